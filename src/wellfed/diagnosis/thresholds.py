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

# Of the device
FEWEST_READINGS = 3
"""Readings of a card while it trained; of fewer nothing is said."""
COPY_FRAC = 0.05
"""Share of a step in copies that nothing hid: more is a finding (5 to 10 %: a proposal)."""
LAUNCH_FRAC = 0.9
"""Time to launch a step over the time that it computes: from here the host is never ahead of the card."""
BUSY_FRAC = 0.85
"""A card that is busy for less of its steps idles within them."""
SM_EMPTY_FRAC, SM_HALF_FRAC, SM_FULL_FRAC = 0.25, 0.5, 0.8
"""Multiprocessors at work: launch-bound whatever the utilisation (KempnerPulse), too small a batch, enough
(DCGM's guide)."""
DRAM_FRAC, TENSOR_FRAC = 0.5, 0.25
"""Bandwidth of the device memory in use: memory-bound (KempnerPulse), unless the tensor cores do work beside it."""
TENSOR_IDLE_FRAC = 0.01
"""Tensor cores at work: less is none (torch-tb-profiler 0.4.3: 0)."""
SYNCHRONISATIONS_A_STEP = 0.5
"""A line that waits for the device at least every other step; what waits now and then costs little."""
LEAST_GAIN = 1.1
"""What would win less is not worth a word."""
MEMORY_USED_FRAC = 0.5
"""Peak over budget: less is memory that is not used."""
CREEP_FRAC, CREEP_WINDOW = 0.05, 10
"""Memory in use, a moving average of so many readings, rose by so much of all there is (smdebug-rulesconfig 1.0.1)."""
LIMITED_FRAC = 0.2
"""Share of readings in which power or heat held the clocks down."""
