"""Lists the thresholds of the diagnosis, each with its source."""

from __future__ import annotations

FEWEST_STEPS = 20
"""Minimum steps after the warm-up for a diagnosis."""
WAIT_FRAC = 0.05
"""Share of a step that waits for data: more is a finding (torch-tb-profiler 0.4.3)."""
CEILING_FACTOR = 1.1
"""Ceiling over rate: less is noise of a ceiling of some 20 steps."""
LEAST_AT_CEILING_FRAC = 0.9
"""Share of the wall time of training in steps at the ceiling's rate: from here on there is nothing left to tune."""
WIDEST_HALF_FRAC = 0.5
"""Half of the rate's 95 % interval over the rate: beyond, the rate is hardly known, nor what could raise it."""
LOSS_GROWTH, LOSS_WINDOW = 10.0, 5
"""Factor of a loss over its running median, and logged values of that median."""

# Of the device
FEWEST_OF_CARD = 3
"""Minimum readings of a card while training."""
AT_WORK_PCT = 1.0
"""Utilisation of a card that does anything at all."""
COPY_FRAC = 0.05
"""Share of a step in copies that nothing hid: more is a finding (5 to 10 %: a proposal)."""
LAUNCH_FRAC = 0.9
"""Time to launch a step over the time that it computes: from here the host is never ahead of the card."""
BUSY_FRAC, HARDLY_BUSY_FRAC = 0.85, 0.2
"""A card that is busy for less of its steps idles within them; for less than the second, launching takes nearly all of
the time, whether the host waits as well or not."""
SM_EMPTY_FRAC, SM_HALF_FRAC, SM_FULL_FRAC = 0.25, 0.5, 0.8
"""Multiprocessors at work: launch-bound whatever the utilisation (KempnerPulse), too small a batch, enough
(DCGM's guide)."""
DRAM_FRAC, TENSOR_FRAC = 0.5, 0.25
"""Bandwidth of the device memory in use: memory-bound (KempnerPulse), unless the tensor cores do work beside it."""
TENSOR_IDLE_FRAC = 0.01
"""Tensor cores at work: less is none (torch-tb-profiler 0.4.3: 0)."""
SYNCHRONISATIONS_A_STEP = 0.5
"""A line that waits for the device at least every other step; what waits now and then costs little."""
LEAST_SYNCHRONISATION_GAIN = 1.05
"""Minimum gain of a step without waiting for the device (a proposal: 5 % of the host's time)."""
LEAST_DEVICE_GAIN = 1.1
"""Minimum gain of a reported finding on the device."""
MEMORY_USED_FRAC = 0.5
"""Peak over budget: less is memory that is not used."""
CREEP_FRAC, CREEP_WINDOW = 0.05, 10
"""Growth of memory in use over its size, and readings of the moving average (smdebug-rulesconfig 1.0.1)."""
LIMITED_FRAC = 0.2
"""Share of readings in which power or heat held the clocks down."""
LEAST_GAIN = 1.05
"""Minimum predicted gain of a reported change of the loader."""
CPU_FULL_FRAC = 0.9
"""Share of the cores that the run keeps at work: more is full (SageMaker's rules: CPU > 90 %)."""
LOADER_CPU_FRAC = 0.4
"""Share of the cores that workers keep at work beside the step: more is in its way (SPDL: CPU > 40 %)."""
BUILD_WAITS_FRAC = 0.5
"""CPU time over wall time of building a batch: less is waiting, for a disk, a network, a service."""
CONTENTION_FACTOR = 1.5
"""Time to build a batch beside other workers over the time alone: more is workers that wait for one another (a
proposal; a lock for the whole build makes it the number of workers)."""
HARDLY_WORK_FRAC = 0.1
"""CPU time of a batch over the time to build it alone: less is hardly longer where cores are scarce (a proposal)."""
OTHERS_FRAC = 0.25
"""Share of the cores that other processes keep at work: more is a machine that is not the run's own."""
CORE_WAIT_FRAC = 0.05
"""Share of training for which a thread waits for a core: less costs a run hardly anything (as of waiting for data)."""
BUSY_READINGS_FRAC = 0.25
"""Share of the readings with full cores, many of them others': more is a machine that others use."""
LITTLE_FRAC = 0.5
"""Share of a step in which all cores would build a batch: less can't make it wait, were the cores the run's own."""
QUEUED_FRAC = 0.3
"""The same for full cores, over the share of a core that a process then gets."""
IOWAIT_CORES = 0.25
"""Cores that stand idle for a disk, on average: more is a slow disk. One reader that does nothing else is one core."""
COLD_FACTOR = 2.0
"""Time to build in the first epoch over later ones, which read the disk cache in memory."""
SLOW_STEPS_FRAC, SLOW_STEP_FACTOR, FEWEST_SLOW = 0.15, 10.0, 2
"""Maximum share, length in steps' time, and minimum number of the steps that wait for single slow samples."""
REPEATED_FRAC, MOST_BY_CHANCE = 0.5, 0.5
"""Share of an epoch's slow samples that must be slow in another, and share of those that chance may have repeated."""
SLOW_BUILD_FACTOR = 5.0
"""Time to build their batches over the median of all."""
UNEVEN_FACTOR = 2.5
"""Time of the slowest batches in a hundred over the mean."""
CAPACITY_FRAC = 0.9
"""Workers that would need this share of the steps' time, or less, are enough on average."""
MOST_PREFETCH = 32
"""Maximum number of batches that a worker keeps ready; longer delays are no unevenness."""
MOST_READY_FRAC = 0.8
"""Share of host memory, or of /dev/shm, that batches kept ready may take: beyond it the plan warns, too."""
MEMORY_FULL_FRAC = 0.9
"""Share of the machine's memory that the run holds: more is nearly full."""
BUSY_THREAD_CORES = 0.25
"""Cores that a Python thread beside the steps takes: less hardly holds them up (a proposal)."""
IDLE_CORES, WORKS_FRAC = 0.5, 0.6
"""Cores that stand idle, and share of a step in which it computes: both or more for a note on threads (proposals)."""
MANY_TENSORS, SMALL_TENSOR = 1000, 4096
"""Tensors that are trained, and values in each on average: more tensors of fewer values are many small ones (a
proposal; a layer of the smallest language models has more values)."""
WIDE_FRAC, WIDE_MIB = 0.5, 0.01
"""Share of a batch and MiB in float64: less is labels or a weight (a proposal)."""
TREND_FACTOR = 1.25
"""Time of the last steps over that of the first: less may be noise that lasts (a proposal)."""
SLOW_START_FRAC, SLOW_START_S = 0.1, 2.0
"""Share of training, and seconds, that its first steps took beyond what others take."""
PAUSE_FRAC = 0.05
"""Share of the time that goes into logging or starting workers: as of waiting."""
CHECKPOINT_FRAC = 0.1
"""Share of the time that checkpoints may take, which keep what was learned."""
VALIDATION_FRAC = 0.2
"""Share of the time that validations may take: they are wanted, and what they cost is chosen."""
FEWEST_PAUSES = 5
"""Minimum number of pauses, as many as the periods of a swing."""
HOOKS_FRAC = 0.05
"""Share of the wall time of training in callbacks and hooks: more is a finding (a proposal)."""
HOST_FRAC, HOST_MS = 0.1, 3.0
"""Share of the time and milliseconds between two steps; Lightning's loop takes 2.2 ms (record 2026-11-21_loop_cpu)."""
BUSY_PCT, IDLE_PCT, FEWEST_READINGS = 70, 10, 500
"""Utilisation swings if its 95th percentile reaches the first and its 5th stays below the second, over so many readings
(smdebug-rulesconfig 1.0.1)."""
EVEN_FRAC = 0.5
"""Share of the waiting that each step has alike, where batches are ready and only have to be taken over."""
