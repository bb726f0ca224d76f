"""Lists the thresholds of the diagnosis, each with its source."""

from __future__ import annotations

from wellfed.data import worker_count

FEWEST_STEPS = 20
"""Minimum steps after the warm-up for a diagnosis."""
WORTH_FRAC = 0.1
"""Minimum share of training, its start and end left out, that a cause must cost to be the verdict."""
WAIT_FRAC = worker_count.WAIT_FRAC
"""Maximum share of a step spent waiting for data without a finding."""
CEILING_FACTOR = 1.1
"""Ceiling over rate. Less is noise of a ceiling of some 20 steps."""
MOSTLY_STEPS_FRAC = 0.9
"""Share of training in steps, from which a finding on its steps is one on all of it."""
WIDEST_HALF_FRAC = 0.5
"""Maximum half-width of the rate's 95 % interval over the rate. Beyond it the rate is too uncertain for advice."""
LOSS_GROWTH, LOSS_WINDOW = 10.0, 5
"""Maximum factor of a loss over its running median, and number of logged values of that median."""

# Of the device
FEWEST_OF_CARD = 3
"""Minimum readings of a card during training."""
AT_WORK_PCT = 1.0
"""Minimum utilisation of a card that works."""
COPY_FRAC = 0.05
"""Maximum share of a step in unhidden copies without a finding (5 to 10 %: a proposal)."""
COPY_AHEAD_FRAC = 0.9
"""Share of a step that copying a batch ahead of it takes, from which steps wait for the copies."""
LAUNCH_FRAC = 0.9
"""Time to launch a step over its compute time, from which the host is never ahead of the card."""
BUSY_FRAC, HARDLY_BUSY_FRAC = 0.85, 0.2
"""Minimum busy share of a card's steps. Below the first it idles within steps. Below the second, launching takes nearly
all of the time, whether or not the host waits as well."""
SM_EMPTY_FRAC, SM_HALF_FRAC, SM_FULL_FRAC = 0.25, 0.5, 0.8
"""Share of active multiprocessors: launch-bound below the first (KempnerPulse), too small a batch, enough (DCGM)."""
DRAM_FRAC, TENSOR_FRAC = 0.5, 0.25
"""Minimum share of memory bandwidth to be memory-bound (KempnerPulse), of active tensor cores to be compute-bound."""
TENSOR_IDLE_FRAC = 0.01
"""Minimum share of active tensor cores; less counts as none (torch-tb-profiler 0.4.3: 0)."""
SYNCHRONISATIONS_A_STEP = 0.5
"""Minimum synchronisations per step of a reported line. Rarer ones cost little."""
LEAST_DEVICE_GAIN = 1.1
"""Minimum gain of a reported finding on the device."""
MEMORY_USED_FRAC = 0.5
"""Peak over budget, below which memory counts as unused."""
CREEP_FRAC, CREEP_WINDOW = 0.05, 10
"""Minimum growth of used memory over its size, and readings of the moving average (smdebug-rulesconfig 1.0.1)."""
LIMITED_FRAC = 0.2
"""Minimum share of readings in which power or heat held the clocks down."""
LEAST_GAIN = 1.05
"""Minimum predicted gain of a reported change of the loader, or of a step that never waits for the device."""
CPU_FULL_FRAC = 0.9
"""Share of busy cores that counts as full (SageMaker's rules: CPU > 90 %)."""
CROWDED_FRAC = 0.8
"""Like `CPU_FULL_FRAC` with more workers than cores, which queue for a core before all are always busy (a proposal)."""
LOADER_CPU_FRAC = 0.4
"""Share of the cores used by workers beside the step, beyond which they slow it down (SPDL: CPU > 40 %)."""
CONTENTION_FACTOR = 1.5
"""Minimum ratio of the time to build a batch beside other workers to the time alone, for workers that wait for one
another (a proposal). With a lock for the whole build it is the number of workers."""
HARDLY_WORK_FRAC = 0.1
"""CPU time of a batch over the time to build it alone, below which scarce cores hardly matter (a proposal)."""
OTHERS_FRAC = 0.25
"""Share of the cores used by other processes, from which the machine counts as shared."""
CORE_WAIT_FRAC = 0.05
"""Share of training that a thread waits for a core, below which the cost is small (like waiting for data)."""
BUSY_READINGS_FRAC = 0.25
"""Minimum share of readings with full cores, many of them used by others, for a shared machine."""
LITTLE_FRAC = 0.5
"""Share of a step in which all cores would build a batch. Below it the run's own work can't make a step wait."""
QUEUED_FRAC = 0.3
"""Like `BUILD_WAITS_FRAC` for full cores, relative to the share of a core that a process then gets."""
IOWAIT_CORES = 0.25
"""Mean number of cores idle for a disk that counts as a slow disk. One reader that does nothing else is one core."""
COLD_FACTOR = 2.0
"""Time to build in the first epoch over later ones, which read the disk cache in memory."""
SLOW_STEPS_FRAC, SLOW_STEP_FACTOR, FEWEST_SLOW = 0.15, 10.0, 2
"""Steps that wait for single slow samples: maximum share, minimum length over a usual step, and minimum number."""
REPEATED_FRAC = 0.5
"""Minimum share of an epoch's slow samples that are slow in another."""
SLOW_BUILD_FACTOR = 5.0
"""Minimum time to build slow batches over the median of all."""
UNEVEN_FACTOR = 2.5
"""Minimum time of the slowest hundredth of the batches over the mean."""
CAPACITY_FRAC = 0.9
"""Workers that need at most this share of the steps' time are enough on average."""
MOST_PREFETCH = 32
"""Maximum number of batches that a worker keeps ready. Longer delays are not unevenness."""
MOST_READY_FRAC = 0.8
"""Maximum share of host memory, or of /dev/shm, for ready batches. The plan warns beyond it, too."""
MEMORY_FULL_FRAC = 0.9
"""Share of a host's or a card's memory that counts as nearly full."""
TREND_FACTOR = 1.25
"""Minimum time of the last steps over the first. Less may be lasting noise (a proposal)."""
SLOW_START_FRAC, SLOW_START_S = 0.1, 2.0
"""Minimum share of training, and seconds, of the first steps' excess time."""
PAUSE_FRAC = 0.05
"""Minimum share of the time for logging, hooks or starting workers, like `WAIT_FRAC`."""
CHECKPOINT_FRAC = 0.1
"""Acceptable share of the time for checkpoints, which keep what was learned."""
VALIDATION_FRAC = 0.2
"""Acceptable share of the time for validations, which are chosen on purpose."""
FEWEST_PAUSES = 5
"""Minimum number of pauses, like the periods of a swing."""
HOST_FRAC, HOST_MS = 0.1, 3.0
"""Minimum share of the time, and milliseconds, between two steps (a proposal)."""
EVEN_FRAC = 0.5
"""Share of the waiting that all steps have alike, from which ready batches only wait for their transfer."""

# Between ranks
STRAGGLER_FRAC = 0.05
"""Minimum share of a step for which the other ranks wait for one rank (a proposal: as `WAIT_FRAC`)."""
APART_FRAC = 0.25
"""Maximum difference of the ranks' mean steps over their median (a proposal). Ranks that differ more do not step
together."""
EXPLAINED_FACTOR = 0.5
"""Minimum share of a rank's excess that a cause must explain (a proposal)."""
CLOCK_FRAC = 0.93
"""Clock of a card over that of another rank's, below which it is slow (a proposal: cards of one kind differ by some
percent)."""
BACKWARD_FACTOR = 3.0
"""Maximum time of most backward passes over the forward pass: two products for one, and a recomputed forward pass."""
