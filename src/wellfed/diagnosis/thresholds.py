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
