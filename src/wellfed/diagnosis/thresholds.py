"""Lists the figures beyond which a rule of the diagnosis speaks, each with where it comes from."""

from __future__ import annotations

FEWEST_STEPS = 20
"""Steps after the warm-up; of fewer nothing is judged."""
WAIT_FRAC = 0.05
"""Share of a step that waits for data: more is a finding (torch-tb-profiler 0.4.3)."""
CEILING_FACTOR = 1.1
"""Ceiling over rate: less is noise of a ceiling of some 20 steps."""
LOSS_GROWTH, LOSS_WINDOW = 10.0, 5
"""A loss above so many times its running median, over so many values that were logged."""
PAUSE_FRAC = 0.05
"""Share of the time that goes into logging or starting workers: as of waiting."""
CHECKPOINT_FRAC = 0.1
"""Share of the time that checkpoints may take, which keep what was learned."""
VALIDATION_FRAC = 0.2
"""Share of the time that validations may take: they are wanted, and what they cost is chosen."""
FEWEST_PAUSES = 5
"""As many as the periods of a swing."""
HOST_FRAC, HOST_MS = 0.1, 3.0
"""Between two steps; Lightning's own loop takes 2.2 ms there (record 2026-11-21_loop_cpu)."""
BUSY_PCT, IDLE_PCT, FEWEST_READINGS = 70, 10, 500
"""Utilisation swings if its 95th percentile reaches the first and its 5th stays below the second, over so many readings
(smdebug-rulesconfig 1.0.1)."""
