"""Words the findings of a watched script for its author, who types no overrides: ``DataLoader(num_workers=4)``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from wellfed.explain.diagnosis.finding import Finding
from wellfed.record.entries import RunRecord

HANDOVER_MS = 2.0
"""Approximate milliseconds to receive a batch from a worker process of a DataLoader."""
_WITHOUT_WORKERS = (
    "Make batches larger, or build whole batches at once (a Dataset with __getitems__), which costs less a sample. "
    f"Workers hardly pay: receiving a batch from one takes about {HANDOVER_MS:g} ms."
)
SPLIT = "split the stream by get_worker_info(), else each worker repeats all samples"
"""Change that more than one worker of an IterableDataset needs. Without it training has other data."""
OWN_STREAM = "Batches are copied on a stream of their own: that copy is not told apart."
"""Message of the event `unseen` of a script that copies ahead of its steps."""
OTHER_THREAD = (
    "Batches are read in another thread than the one that trains. The wait for them counts as time between steps."
)
NO_LOADER = "No DataLoader was iterated: making batches counts as time between steps, or as part of them."
"""Messages of the event `unseen` of a script whose waiting for data was not seen."""
OF_LOADER = ("num_workers", "prefetch_factor", "persistent_workers", "pin_memory")
"""Knobs that DataLoader has under the same name."""
_LITERALS = {"true": "True", "false": "False", "null": "None"}
_AHEAD = (
    "copy the next batch in a torch.cuda.Stream of its own (x.to(device, non_blocking=True) of pinned memory), and "
    "wait_stream before its step"
)
_STEP = "workload.effective_batch_size"
_CODE: Mapping[str, Mapping[str, str]] = {
    "loader.device_prefetch": {"": _AHEAD},
    "gpu.precision": {
        "bf16-mixed": 'torch.autocast("cuda", torch.bfloat16)',
        "16-mixed": 'torch.autocast("cuda", torch.float16) with torch.amp.GradScaler()',
    },
    "gpu.tf32": {"": 'torch.set_float32_matmul_precision("high")'},
    "gpu.compile": {"default": "torch.compile(model)", "": 'torch.compile(model, mode="reduce-overhead")'},
    "trainer.strategy": {"": "torch.nn.parallel.DistributedDataParallel(model)"},
    "trainer.devices": {"": "torchrun --nproc-per-node={}"},
    _STEP: {"": "DataLoader(batch_size={})"},
    "memory.micro_batch": {"": "DataLoader(batch_size={}) with accumulated gradients"},
    "trainer.gradient_clip": {"": "torch.nn.utils.clip_grad_norm_(model.parameters(), {})"},
    "trainer.validate_every_steps": {"": "validation every {} steps"},
    "trainer.checkpoint_every_steps": {"": "torch.save every {} steps"},
    "trainer.log_every_steps": {"": "logging every {} steps"},
}
"""Knob -> value, or empty for any -> code or words for it. Knobs that are not here have no counterpart."""
_PHRASES = (
    ("Give the run more steps (trainer.max_steps, trainer.max_epochs)", "Let it run longer"),
    (" (trainer.max_steps)", ""),
    (
        "callbacks, loggers and hooks of the model run then.",
        "logging, printed values (.item()), schedulers, and batches that the script makes itself come then.",
    ),
    (
        "the callbacks, loggers and hooks cheaper that run",
        "logging, printed values (.item()) and schedulers cheaper that run",
    ),
    ("set fewer loader.num_workers", "set fewer num_workers of its DataLoader"),
    ("set more loader.num_workers", "set more num_workers of its DataLoader"),
    ("loader.pin_memory and loader.device_prefetch hide", "pinned memory and copies ahead hide"),
    ("debug=profiler shows", "torch.profiler shows"),
    ("fetch for whole batches", "whole batches at once (a Dataset with __getitems__)"),
    ("augmentation in on_device", "augmentation on the GPU"),
    (" (on_device)", ""),
    (" With a fetch in the data, threads avoid this.", ""),
    ("loader.skip_ids leaves them out from the start", "leave them out of the Dataset"),
    ("loader.skip_ids leaves them out", "or leave them out of the Dataset"),
    (
        "or fewer and larger tensors in the model.",
        "an optimizer with fused=True, fewer and larger tensors in the model.",
    ),
    ("(gpu.channels_last)", "(memory_format=torch.channels_last)"),
    (" (gpu.precision=32-true)", ""),
    ("gpu.allocator=expandable avoids", "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True avoids"),
    ("trainer.devices=2 trainer.strategy=ddp gives", "DistributedDataParallel under torchrun gives"),
)
"""Words of rules -> words for a script."""


def is_script(record: RunRecord) -> bool:
    """Returns whether the record is a watched script's."""
    return "script" in record.config


def in_script_words(finding: Finding, record: RunRecord) -> Finding:
    """Returns the finding with code instead of overrides. Workers are not advised where handing over costs as much."""
    build_ms = finding.evidence.get("build_ms", HANDOVER_MS)
    if finding.id == "loading_in_main_process" and isinstance(build_ms, float) and build_ms < HANDOVER_MS:
        message, lost_frac = in_words(finding.message), finding.time_lost_frac
        return replace(finding, message=message, advice=_WITHOUT_WORKERS, change=(), gain=None, lost_frac=lost_frac)
    change = tuple(dict.fromkeys(_changes(finding.change, record)))
    return replace(finding, message=in_words(finding.message), advice=in_words(finding.advice), change=change)


def in_words(message: str) -> str:
    """Returns a message without knobs of runs of our own."""
    for old, new in _PHRASES:
        message = message.replace(old, new)
    return message


def _changes(overrides: Sequence[str], record: RunRecord) -> Iterator[str]:
    """Yields code for overrides. All settings of the DataLoader are one change."""
    values = dict(override.lstrip("+").split("=", 1) for override in overrides if "=" in override)
    loader = {name: values[key] for name in OF_LOADER if (key := f"loader.{name}") in values}
    before = record.config.get("loader", {})
    if loader.get("num_workers", "0") not in ("0", "null") and not before.get("persistent_workers"):
        loader.setdefault("persistent_workers", "true")
    if loader:
        yield f"DataLoader({', '.join(f'{name}={_LITERALS.get(value, value)}' for name, value in loader.items())})"
    if before.get("is_iterable") and loader.get("num_workers", "0") not in ("0", "1", "null"):
        yield SPLIT
    effective, size = record.config.get("workload", {}).get("effective_batch_size"), before.get("batch_size")
    if effective and size and values.get(_STEP, "null") != "null":  # of all ranks and accumulated batches
        values[_STEP] = str(max(1, int(values[_STEP]) * size // effective))
    for knob, value in values.items():
        known = _CODE.get(knob)
        if known is not None and value != "null":
            text = known.get(value, known.get(""))
            if text is not None:
                yield text.format(value)
