"""Lists the faults that `benchmarks/diagnosis.py` plants in real runs, and the runs that have none.

Overrides are those of `src/train.py`; those under ``workload`` and ``callbacks`` are what a user's own code does, see
`benchmarks/planted_workload.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Where = Literal["cpu", "simulated", "gpu"]


@dataclass(frozen=True)
class Shape:
    """A workload: what its batches and steps are like."""

    name: str
    yaml: str
    """Its option of the group ``workload``."""
    step_ms: float
    batch_bytes: int


def _shape(name: str, model: str, sizes: list[int], batch: int, step_ms: float) -> Shape:
    """On a CPU the model rests for most of a step, see planted_workload.py."""
    yaml = f"""
name: {name}
sample_unit: samples
effective_batch_size: {batch}
model: {{_target_: planted_workload.{model}, step_ms: {step_ms}, batch: {batch}}}
data:
  _target_: planted_workload.data
  sizes: {sizes}
  batch: {batch}
  step_ms: {step_ms}
optimizer: {{_target_: torch.optim.AdamW, lr: 0.001}}
"""
    return Shape(name, yaml, step_ms, 4 * batch * math.prod(sizes))


SHAPES = (
    _shape("table", "Table", [32], 32, 20.0),
    _shape("pictures", "Pictures", [3, 48, 48], 16, 30.0),
    _shape("sequences", "Sequences", [32, 8], 32, 45.0),
)


@dataclass(frozen=True)
class Fault:
    """A cause of lost time, and how it comes about."""

    kind: str
    """Tells it from others with the same cause."""
    cause: str
    """The id of the finding that must come first."""
    where: Where
    code: tuple[str, ...] = ()
    """Settings that are the same with and without the fault."""
    fault: tuple[str, ...] = ()
    """Settings that plant the fault."""
    cure: tuple[str, ...] | None = None
    """Instead of ``fault``, where knobs can remove it: chosen by hand, what the finding's own are compared with."""
    steps: int = 80
    card: Mapping[str, Any] = field(default_factory=dict)
    """Simulated machine: fields of `tests.fake_cuda.machine.Cards`; ``pageable_steps`` and ``pinned_steps`` say
    in how much of a step a batch is copied."""
    burners: int = 0
    """Processes beside the run that take a core each until its steps are over."""
    is_note: bool = False
    """The finding is a note, beside one that nothing costs time."""
    also: tuple[str, ...] = ()
    """Other ids that say the same of it."""
    shapes: tuple[str, ...] = ()
    """Shapes in which it costs something; empty = all."""


@dataclass(frozen=True)
class Healthy:
    """A run that loses nothing."""

    kind: str
    where: Where
    code: tuple[str, ...] = ()
    steps: int = 80
    card: Mapping[str, Any] = field(default_factory=dict)


def _data(**values: Any) -> tuple[str, ...]:
    return tuple(f"+workload.data.{name}={value}" for name, value in values.items())


def _model(**values: Any) -> tuple[str, ...]:
    return tuple(f"++workload.model.{name}={value}" for name, value in values.items())


def _callback(**values: Any) -> tuple[str, ...]:
    """`planted_workload.Pause`, whose times are counted in steps."""
    args = {"_target_": "planted_workload.Pause", "step_ms": "${workload.data.step_ms}", **values}
    return tuple(f"+callbacks.pause.{name}={value}" for name, value in args.items())


def _workers(number: int, *more: str) -> tuple[str, ...]:
    return ("loader.backend=processes", f"loader.num_workers={number}", *more)


INLINE = ("loader.backend=inline", "loader.num_workers=0")
WHOLE = _data(has_fetch="true")
ON_CARD = _model(rests="false", works="true")
"""The card computes beside the host by itself."""

OF_LOADER = (
    Fault("loading_in_main_process", "loading_in_main_process", "cpu", _data(build_steps=1.5), INLINE, _workers(3)),
    Fault("too_few_workers", "too_few_workers", "cpu", _data(build_steps=2.5), _workers(1), _workers(4)),
    Fault("too_few_in_lockstep", "too_few_workers", "cpu", _data(build_steps=8), _workers(4), _workers(10), steps=120),
    Fault("cpu_bound_loading", "cpu_bound_loading", "cpu", _data(build_steps=4, how="spin"), _workers(2)),
    Fault("slow_storage", "slow_storage", "cpu", _data(build_steps=0.5, cold_steps=4, num_batches=30), _workers(2),
          steps=120),
    Fault("workers_take_the_cpu", "workers_take_the_cpu", "cpu",
          (*_data(build_steps=0.3, how="threads"), *_model(rests="false", works="true")),
          _workers(4), _workers(1)),
    Fault("uneven_batches", "uneven_batches", "cpu", _data(build_steps=0.8, heavy="true"),
          _workers(2, "loader.prefetch_factor=1"), _workers(2, "loader.prefetch_factor=8"), steps=160),
    Fault("slow_samples", "slow_samples", "cpu", _data(build_steps=0.5, slow_samples=10, slow_s=0.8, num_batches=40),
          _workers(2), steps=120),
    Fault("slow_samples_once", "uneven_batches", "cpu", _data(build_steps=0.5, slow_samples=6, slow_s=0.8),
          _workers(2), steps=120),
    Fault("slow_handover", "slow_handover", "cpu", _data(build_steps=0.5, columns=1500), _workers(2),
          steps=120),
    Fault("host_memory_full", "host_memory_full", "cpu", _data(build_steps=0.5, dies_after=20), _workers(2)),
)  # fmt: skip
OF_LOADER_UNTUNED = (
    Fault("lock_in_the_dataset", "contended_loading", "cpu", _data(build_steps=2.5, how="lock"), _workers(3)),
    Fault("rate_limited_store", "contended_loading", "cpu", _data(build_steps=2.5, how="limit"), _workers(3)),
    Fault("latency_with_a_tail", "too_few_workers", "cpu", _data(build_steps=3, latency=2.5), _workers(1),
          also=("uneven_batches",), steps=120),
    Fault("random_latency", "uneven_batches", "cpu", _data(build_steps=0.3, late=400, late_s=0.6), _workers(2),
          steps=160, also=("too_few_workers",)),
    Fault("jpeg_decoded_whole", "cpu_bound_loading", "cpu", _data(build_steps=4, how="jpeg"), _workers(2)),
    Fault("slow_tokenizer", "cpu_bound_loading", "cpu", _data(build_steps=4, how="words"), _workers(2)),
    Fault("nested_loader", "cpu_bound_loading", "cpu", _data(build_steps=4, how="nested"), _workers(2)),
    Fault("slow_collate", "cpu_bound_loading", "cpu", _data(collate_steps=4), _workers(2)),
    Fault("slow_collate_in_main_process", "loading_in_main_process", "cpu", _data(collate_steps=1.5), INLINE),
    Fault("jittered_store", "too_few_workers", "cpu", _data(build_steps=3, jitter=0.5), _workers(1), _workers(5)),
)  # fmt: skip
OF_LOOP = (
    Fault("restarted_workers", "restarted_workers", "cpu",
          _data(build_steps=0.5, num_batches=12, open_s=0.2, eval_batches=0),
          _workers(2, "loader.persistent_workers=false"), _workers(2, "loader.persistent_workers=true"), steps=120),
    Fault("frequent_logging", "frequent_logging", "cpu", (*WHOLE, *_callback(steps=3, when="logging")),
          ("trainer.log_every_steps=5",), ("trainer.log_every_steps=50",), steps=120),
    Fault("frequent_checkpoints", "frequent_checkpoints", "cpu", (*WHOLE, *_model(extra_mib=48)),
          ("trainer.checkpoint_every_steps=8",), ("trainer.checkpoint_every_steps=1000",), steps=120),
    Fault("frequent_validation", "frequent_validation", "cpu", (*WHOLE, *_data(eval_batches=8), *_model(eval_steps=1)),
          ("trainer.validate_every_steps=10",), ("trainer.validate_every_steps=1000",), steps=120),
    Fault("slow_callback", "slow_callbacks", "cpu", WHOLE, _callback(steps=0.8)),
    Fault("slow_callback_at_times", "slow_callbacks", "cpu", WHOLE, _callback(steps=6, every=10), steps=120),
    Fault("loss_blows_up", "loss_blows_up", "cpu", (*WHOLE, "trainer.log_every_steps=2"),
          _model(outlier_from=50)),
    Fault("loss_is_nan", "loss_blows_up", "cpu", (*WHOLE, "trainer.log_every_steps=2"),
          ("workload.optimizer.lr=1e18",)),
    Fault("slow_start", "slow_start", "cpu", WHOLE, _model(first_s=4), is_note=True),
    Fault("data_parallel", "data_parallel", "cpu", WHOLE, _model(parallel="true")),
    Fault("machine_was_slower", "busy_machine", "cpu", (*WHOLE, *_model(rests="false", works="true")), burners=4),
)  # fmt: skip
OF_LOOP_UNTUNED = (
    Fault("callback_at_batch_start", "slow_callbacks", "cpu", WHOLE, _callback(steps=0.8, when="on_train_batch_start")),
    Fault("callback_before_backward", "slow_callbacks", "cpu", WHOLE, _callback(steps=0.8, when="on_before_backward")),
    Fault("callback_after_backward", "slow_callbacks", "cpu", WHOLE, _callback(steps=0.8, when="on_after_backward")),
    Fault("callback_before_optimizer", "slow_callbacks", "cpu", WHOLE,
          _callback(steps=0.8, when="on_before_optimizer_step")),
    Fault("work_at_epoch_ends", "slow_callbacks", "cpu", (*WHOLE, *_data(num_batches=20)),
          _callback(steps=40, when="on_train_epoch_end")),
    Fault("work_at_epoch_starts", "slow_callbacks", "cpu", (*WHOLE, *_data(num_batches=20)),
          _callback(steps=40, when="on_train_epoch_start")),
    Fault("average_on_the_host", "slow_callbacks", "cpu", WHOLE,
          ("+callbacks.mean={_target_: planted_workload.HostAverage, values: 500000}",)),
    Fault("slow_scheduler", "slow_callbacks", "cpu", WHOLE,
          ("+workload.schedule={_target_: planted_workload.SlowSchedule, takes_ms: 30, interval: step}",)),
    Fault("one_long_validation", "frequent_validation", "cpu", (*WHOLE, *_data(eval_batches=40), *_model(eval_steps=2)),
          ("trainer.validate_every_steps=60",), steps=120),
    Fault("few_long_checkpoints", "frequent_checkpoints", "cpu", (*WHOLE, *_model(extra_mib=400)),
          ("trainer.checkpoint_every_steps=30",), steps=100),
    Fault("growing_loss", "step_time_trend", "cpu", WHOLE, _model(grows=0.03), steps=100),
    Fault("growing_loss_with_workers", "step_time_trend", "cpu", (*_data(build_steps=0.2), *_workers(1)),
          _model(grows=0.03), steps=100),
    Fault("busy_machine", "busy_machine", "cpu", (*_data(build_steps=0.5, how="spin"), *_workers(1)), burners=4,
          also=("machine_was_slower",)),
)  # fmt: skip
OF_CARD = (
    Fault("starved_card", "loading_in_main_process", "simulated", (*ON_CARD, *_data(build_steps=1.5)), INLINE,
          _workers(3)),
    Fault("lockstep_card", "too_few_workers", "simulated", (*ON_CARD, *_data(build_steps=8)), _workers(4),
          _workers(10), steps=160),
    Fault("slow_copy", "slow_copy", "simulated", (*ON_CARD, *WHOLE),
          ("loader.pin_memory=false", "loader.device_prefetch=0"),
          ("loader.pin_memory=true", "loader.device_prefetch=2"), card={"pageable_steps": 0.6, "pinned_steps": 0.2}),
    Fault("small_batch", "small_batch", "simulated", (*ON_CARD, *WHOLE), ("memory.micro_batch=2",),
          ("memory.accumulate=1",)),
    Fault("split_steps", "small_batch", "simulated", (*ON_CARD, *WHOLE), ("memory.accumulate=4",),
          ("memory.accumulate=1",)),
    Fault("memory_unused", "memory_unused", "simulated", (*_model(rests="false", deep=6), *WHOLE),
          ("memory.checkpoint_activations=true",), ("memory.checkpoint_activations=false",)),
    Fault("launch_bound", "launch_bound", "simulated", (*_model(rests="false"), *WHOLE), _model(small_ops=40),
          card={"launch_us": 500}),
    Fault("synchronisation", "synchronisation", "simulated", (*ON_CARD, *WHOLE), _model(asks="true"),
          card={"launch_us": 40}),
    Fault("tensor_cores_idle", "tensor_cores_idle", "simulated", (*ON_CARD, *WHOLE),
          ("gpu.precision=32-true", "gpu.tf32=false"), ("gpu.precision=bf16-mixed", "gpu.tf32=true")),
    Fault("memory_bound", "memory_bound", "simulated", (*_model(rests="false"), *WHOLE), _model(moves="true")),
    Fault("clocks_limited", "clocks_limited", "simulated", (*ON_CARD, *WHOLE), card={"throttle": "1:0.5:heat"},
          steps=200, is_note=True),
    Fault("device_memory_full", "device_memory_full", "simulated", (*ON_CARD, *WHOLE, *_model(scratch_mib=100)),
          ("memory.accumulate=1", "memory.on_oom=fail"), card={"mib": 192, "context_mib": 50, "dram_gbps": 4}),
    Fault("memory_creeps", "memory_creeps", "simulated", (*ON_CARD, *WHOLE), _model(keeps_mib=8),
          card={"mib": 2048}, steps=100),
    Fault("pauses_of_its_own", "utilisation_swings", "simulated", (*ON_CARD, *WHOLE),
          _model(pause_every=40, pause_s=0.8), steps=320),
)  # fmt: skip
OF_CARD_UNTUNED = (
    Fault("tiny_batches", "launch_bound", "simulated", (*ON_CARD, *WHOLE), ("workload.effective_batch_size=2",),
          card={"launch_us": 300}, also=("small_batch",)),
    Fault("small_tensors_on_card", "launch_bound", "simulated", (*_model(rests="false"), *WHOLE), _model(tiny=300),
          card={"launch_us": 60}),
    Fault("float64_copies", "slow_copy", "simulated", (*ON_CARD, *WHOLE, *_data(wide="true")),
          ("loader.pin_memory=false", "loader.device_prefetch=0"), card={"pageable_steps": 0.4, "pinned_steps": 0.1}),
    Fault("growing_loss_on_card", "step_time_trend", "simulated", (*ON_CARD, *WHOLE), _model(grows=0.03), steps=100),
)  # fmt: skip
ON_GPU = (*_model(rests="false", works="true", size=4096),)
"""A real card computes beside the host."""
LARGE = ("workload.data.sizes=[3,512,512]", *_data(num_batches=20))
"""Batches of 50 MB for `Pictures`."""
OF_GPU = (
    Fault("starved_gpu", "loading_in_main_process", "gpu", (*ON_GPU, *_data(build_steps=1.5)), INLINE, _workers(3)),
    Fault("lockstep_gpu", "too_few_workers", "gpu", (*ON_GPU, *_data(build_steps=8)), _workers(4), _workers(10),
          steps=160),
    Fault("cpu_bound_gpu", "too_few_workers", "gpu", (*ON_GPU, *_data(build_steps=4, how="spin")), _workers(2),
          _workers(8), steps=120),
    Fault("slow_copy_gpu", "slow_copy", "gpu", (*ON_GPU, *WHOLE, *LARGE),
          ("loader.pin_memory=false", "loader.device_prefetch=0"),
          ("loader.pin_memory=true", "loader.device_prefetch=2"), shapes=("pictures",)),
    Fault("memory_unused_gpu", "memory_unused", "gpu",
          (*_model(rests="false", deep=12, size=4096), *WHOLE, "trainer.checkpoint_every_steps=1000"),
          ("memory.checkpoint_activations=true",), ("memory.checkpoint_activations=false",), steps=400),
    Fault("launch_bound_gpu", "launch_bound", "gpu", (*_model(rests="false"), *WHOLE), _model(small_ops=4000)),
    Fault("tiny_tensors_gpu", "launch_bound", "gpu", (*_model(rests="false"), *WHOLE), _model(tiny=500)),
    Fault("synchronisation_gpu", "synchronisation", "gpu", (*_model(rests="false", works="true", size=2048), *WHOLE),
          _model(asks="true")),
    Fault("tensor_cores_idle_gpu", "tensor_cores_idle", "gpu", (*ON_GPU, *WHOLE, *_model(products=10)),
          ("gpu.precision=32-true", "gpu.tf32=false"), ("gpu.precision=bf16-mixed", "gpu.tf32=true"), steps=160),
    Fault("memory_bound_gpu", "memory_bound", "gpu", (*_model(rests="false", size=16384), *WHOLE),
          _model(moves="true")),
    Fault("device_memory_full_gpu", "device_memory_full", "gpu",
          (*ON_GPU, *WHOLE, *_model(scratch_mib=8000), "gpu.memory_gib=4", "gpu.enforce=true"),
          ("memory.accumulate=1", "memory.on_oom=fail")),
    Fault("memory_creeps_gpu", "memory_creeps", "gpu", (*ON_GPU, *WHOLE, "gpu.memory_gib=4"), _model(keeps_mib=16),
          steps=100),
    Fault("pauses_gpu", "utilisation_swings", "gpu", (*ON_GPU, *WHOLE), _model(pause_every=40, pause_s=0.8), steps=320),
    Fault("growing_loss_gpu", "step_time_trend", "gpu", (*ON_GPU, *WHOLE), _model(grows=0.03), steps=100),
)  # fmt: skip
TUNED = OF_LOADER + OF_LOOP + OF_CARD
"""Kinds with which the rules were written."""
UNTUNED = OF_LOADER_UNTUNED + OF_LOOP_UNTUNED + OF_CARD_UNTUNED
"""Kinds that were thought of later, most by somebody else."""
FAULTS = TUNED + UNTUNED + OF_GPU

LONG = ("workload.model.step_ms=80", "workload.data.step_ms=80")
"""Steps so long that receiving a batch from a worker process costs nothing that counts."""
HEALTHY = (
    Healthy("whole_batches", "cpu", WHOLE),
    Healthy("sample_by_sample", "cpu"),
    Healthy("workers", "cpu", (*LONG, *_data(build_steps=0.5), *_workers(2))),
    Healthy("accumulated", "cpu", (*WHOLE, "memory.accumulate=2")),
    Healthy("epochs", "cpu", (*LONG, *_data(build_steps=0.3, num_batches=60), *_workers(2)), steps=180),
    Healthy("computes", "cpu", (*WHOLE, *_model(rests="false", works="true"))),
    Healthy("augments", "cpu", (*LONG, *_data(build_steps=0.25, how="spin"), *_workers(1))),
    Healthy("cheap_callbacks", "cpu", (*WHOLE, *_callback(steps=0.02))),
    Healthy("short_validations", "cpu", (*WHOLE, *_data(eval_batches=1), "trainer.validate_every_steps=40"), steps=120),
    Healthy("jitters", "cpu", (*WHOLE, *_model(jitters=0.15)), steps=120),
    Healthy("on_card", "simulated", (*ON_CARD, *WHOLE)),
    Healthy("workers_on_card", "simulated", (*ON_CARD, *_data(build_steps=0.3), *_workers(2))),
    Healthy("on_gpu", "gpu", (*ON_GPU, *WHOLE), steps=160),
    Healthy("workers_on_gpu", "gpu", (*ON_GPU, *_data(build_steps=0.3), *_workers(2)), steps=160),
    Healthy("accumulated_on_gpu", "gpu", (*ON_GPU, *WHOLE, "memory.accumulate=2"), steps=160),
    Healthy("accumulated_on_card", "simulated", (*ON_CARD, *WHOLE, "memory.accumulate=2"), card={"sms": 4}),
)
