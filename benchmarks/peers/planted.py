"""Lists the faults that `benchmarks/peers_diagnosis.py` plants in its scripts, and what a verdict on each must say.

The kinds of a bottleneck, which both tools are held to:

    input     steps wait for data
    copy      steps wait for copies to the device
    between   time passes outside of the passes and the optimizer, within the loop or between epochs
    compute   forward, backward and optimizer take the time
    start     the first steps took it
    none      nothing costs time

TraceML has no verdict on the start. `Fault.kinds` holds all kinds that count as right for that fault, for either tool.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

INPUT, COPY, BETWEEN, COMPUTE, START, NONE = "input", "copy", "between", "compute", "start", "none"


@dataclass(frozen=True)
class Fault:
    """A cause of lost time in a script, and the verdicts on it that count as right."""

    name: str
    says: str
    """Fault of the script."""
    kinds: tuple[str, ...]
    """Kinds of bottleneck that are right, for either tool."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `parts.Settings`."""
    causes: tuple[str, ...] = ()
    """Our ids that name the cause. Reported beside the verdict, and not part of it."""
    card: Mapping[str, float] | None = None
    """Fields of `tests.fake_cuda.machine.Cards`, for a fault of a simulated card; None = on the CPU."""


READY = {"batch": 8}
"""Data in memory, which the training process joins at once: no worker that a busy machine could keep waiting."""
WORKERS = {"workers": 2, "prefetch": 4}
CARD: Mapping[str, Any] = {"rest_ms": 0.0, "width": 32, "layers": 2, "features": 32}
"""Steps whose work a simulated card does."""
FAULTS = (
    # Steps wait for data
    Fault("decode_without_workers", "the training process decodes all samples itself", (INPUT,),
          {"build_ms": 2.0, "build": "work"}, ("loading_in_main_process", "cpu_bound_loading")),
    Fault("network_without_workers", "samples come over a network, one after another, in the training process",
          (INPUT,), {"build_ms": 2.5}, ("loading_in_main_process",)),
    Fault("too_few_workers", "one worker for data that needs three", (INPUT,), {"workers": 1, "build_ms": 4.0},
          ("too_few_workers",)),
    Fault("slow_collate", "the function that joins samples takes longer than the step", (INPUT,), {"collate_ms": 36.0},
          ("loading_in_main_process", "cpu_bound_loading")),
    Fault("rare_slow_samples", "a sample in 100 takes a second", (INPUT,),
          {**WORKERS, "slow_every": 100, "slow_ms": 1000.0}, ("uneven_batches", "slow_samples")),
    Fault("restarted_workers", "workers that open their files are started anew for each epoch of 8 steps",
          (INPUT, BETWEEN), {**WORKERS, "persistent": False, "epoch_steps": 8, "worker_start_ms": 250.0},
          ("restarted_workers",)),
    Fault("too_many_workers", "eight workers share the cores", (INPUT,),
          {"workers": 8, "build_ms": 6.0, "build": "work"}, ("cpu_bound_loading", "workers_take_the_cpu")),
    Fault("locked_dataset", "four workers read one after another, as the data set holds a lock", (INPUT,),
          {"workers": 4, "build_ms": 4.0, "is_locked": True}, ("contended_loading",)),
    Fault("accumulated_slow_data", "gradients of two slowly read batches are accumulated", (INPUT,),
          {"build_ms": 2.5, "accumulate": 2}, ("loading_in_main_process",)),
    # Time between the passes, the steps and the epochs
    Fault("augmented_in_loop", "the loop augments each batch before the forward pass", (BETWEEN,),
          {**READY, "augment_ms": 32.0}, ("slow_callbacks",)),
    Fault("prints", "the weights are printed after each step", (BETWEEN,), {**READY, "print_ms": 32.0},
          ("slow_callbacks", "frequent_logging")),
    Fault("slow_logger", "figures are sent to a server after each step", (BETWEEN,), {**READY, "log_ms": 32.0},
          ("slow_callbacks", "frequent_logging")),
    Fault("frequent_checkpoints", "a checkpoint of 60 MB every 2 steps", (BETWEEN,),
          {**READY, "checkpoint_every": 2, "state_mib": 60.0}, ("frequent_checkpoints",)),
    Fault("frequent_validation", "a validation of 10 batches every 5 steps", (BETWEEN,),
          {**READY, "validate_every": 5}, ("frequent_validation",)),
    Fault("slow_scheduler", "the learning rate's schedule is computed anew in each step", (BETWEEN,),
          {**READY, "schedule_ms": 32.0}, ("slow_callbacks",)),
    Fault("collected_garbage", "gc.collect() after each step", (BETWEEN,), {**READY, "garbage": 150_000},
          ("slow_callbacks",)),
    Fault("gradient_statistics", "statistics of the gradients before each step of the optimizer", (BETWEEN,),
          {**READY, "gradient_ms": 32.0}, ("slow_callbacks",)),
    Fault("python_loss", "the loss goes through the batch in Python", (BETWEEN,), {**READY, "loss_ms": 32.0},
          ("slow_callbacks",)),
    Fault("work_between_epochs", "half a second of work after each epoch of 10 steps", (BETWEEN,),
          {**READY, "steps": 70, "epoch_steps": 10, "epoch_end_ms": 500.0}, ("slow_callbacks",)),
    # Forward, backward and optimizer
    Fault("optimizer_by_tensor", "the optimizer updates 1,500 small tensors one by one", (COMPUTE,),
          {**READY, "rest_ms": 2.0, "tensors": 1500}, ("many_tensors",)),
    Fault("growing_loss", "the loss goes through a list that grows with each step", (COMPUTE, BETWEEN),
          {**READY, "grows": 20, "steps": 70}, ("step_time_trend",)),
    Fault("tiny_batches", "two samples at a time through 400 small layers", (COMPUTE,),
          {"rest_ms": 0.0, "layers": 400, "width": 8, "features": 8, "batch": 2, "steps": 100}, ("many_tensors",)),
    Fault("second_forward", "accuracy by a second pass over each batch, after the step", (COMPUTE, BETWEEN),
          {**READY, "second_passes": 2}, ("slow_callbacks", "frequent_validation")),
    Fault("slow_first_step", "the first step takes four seconds", (START,),
          {**READY, "first_ms": 4000.0}, ("slow_start",)),
)  # fmt: skip
"""Faults on the CPU."""
SIMULATED = (
    Fault("unpinned_copies", "large batches are copied from memory that is not pinned", (COPY,),
          {**CARD, "workers": 2, "batch": 64, "features": 16384, "width": 16},
          ("slow_copy",), {"copy_gbps": 2.0, "pageable_gbps": 0.1}),
    Fault("small_kernels", "many small kernels, which the host launches one by one", (COMPUTE,),
          {**CARD, "workers": 2, "layers": 60}, ("launch_bound", "small_batch"), {"launch_us": 100.0}),
)  # fmt: skip
"""Faults of a simulated card, for `wellfed watch` alone."""
ON_GPU = (
    Fault("copies_to_gpu", "batches of 64 MiB are copied from memory that is not pinned", (COPY,),
          {"rest_ms": 0.0, "workers": 8, "prefetch": 2, "batch": 64, "features": 2**18, "width": 64, "steps": 40},
          ("slow_copy",)),
    Fault("kernels_of_gpu", "many small kernels, which the host launches one by one", (COMPUTE,),
          {"rest_ms": 0.0, "workers": 2, "prefetch": 4, "layers": 60, "width": 32, "features": 32, "steps": 150},
          ("launch_bound", "small_batch", "many_tensors")),
    Fault("computes_on_gpu", "no fault: a model that keeps the GPU at work", (NONE, COMPUTE),
          {"rest_ms": 0.0, "workers": 2, "prefetch": 4, "batch": 256, "width": 8192, "layers": 8, "features": 64},
          ("healthy", "unknown")),
)  # fmt: skip
"""Further scripts where a real GPU is, for both tools."""
HEALTHY = (
    Fault("fed", "no fault: each batch is in memory", (NONE, COMPUTE), READY, ("healthy", "unknown")),
    Fault("computes", "no fault: a model that keeps the CPU at work", (NONE, COMPUTE),
          {**READY, "rest_ms": 0.0, "width": 640, "layers": 3, "features": 32, "batch": 64}, ("healthy", "unknown")),
)  # fmt: skip
"""Runs that no tool may accuse."""
ALL = {fault.name: fault for fault in (*FAULTS, *SIMULATED, *ON_GPU, *HEALTHY)}

OURS = {
    **dict.fromkeys(
        (
            *("loading_in_main_process", "too_few_workers", "cpu_bound_loading", "slow_storage", "contended_loading"),
            *("workers_take_the_cpu", "uneven_batches", "slow_samples", "slow_handover", "restarted_workers"),
        ),
        INPUT,
    ),
    "slow_copy": COPY,
    **dict.fromkeys(
        ("frequent_logging", "frequent_checkpoints", "frequent_validation", "slow_callbacks", "busy_thread"), BETWEEN
    ),
    **dict.fromkeys(
        (
            *("launch_bound", "memory_bound", "small_batch", "synchronisation", "tensor_cores_idle", "many_tensors"),
            *("few_threads", "step_time_trend"),
        ),
        COMPUTE,
    ),
    "slow_start": START,
}
"""Kind of bottleneck by our ids. `unexplained` is the input if steps wait; other ids accuse nothing."""
THEIRS = {"INPUT_BOUND": INPUT, "H2D_BOUND": COPY, "RESIDUAL_HEAVY": BETWEEN, "COMPUTE_BOUND": COMPUTE}
"""Kind of bottleneck by TraceML's; others accuse nothing."""
COMPUTES_FRAC = 0.9
"""Share of compute from which a verdict that accuses nothing counts as `compute`: that of TraceML's COMPUTE-BOUND."""
