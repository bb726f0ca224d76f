"""Knobs that earlier states of the project had, with what to do instead."""

from __future__ import annotations

from collections.abc import Mapping

GONE: Mapping[str, str] = {
    "config.allow_targets": "leave it out; a configuration may name any installed package",
    "gpu.ballast": "leave it out; a named card limits what torch may reserve (gpu.enforce)",
    "hydra/launcher=wellfed": "leave it out; trials are forked unless another launcher is chosen",
    "loader.shuffle_buffer": "shuffle in the stream itself, by set_epoch(epoch), or use a dataset with __getitem__",
    "loader.worker_threads": "leave it out; a worker has one thread, more by torch.set_num_threads in worker_init_fn",
    "logger.diff": "leave it out; run.json names the changed files and the digest of the change, no longer its text",
    "memory.micro_batch_steps": "leave it out; the micro-batch is halved when memory runs out",
    "memory.plateau_frac": "set memory.micro_batch or memory.accumulate; sweep=throughput measures rates",
    "memory.remember": "leave it out; the report of a run that went down shows the memory.micro_batch to type",
    "memory.stages": "train with memory=cache, then resume=<run> memory=dynamic workload.model.train_encoder=true",
    "target_util_pct": "leave it out; a run's report has the utilisation, and sweep=throughput measures rates",
    "tune.fixed": "leave it out; tune ends with the overrides to type, and any of them can be typed otherwise",
    "wellfed monitor --serve": "use nvitop-exporter or DCGM exporter for Prometheus",
    "wellfed train --plan": "wellfed plan with the same words shows each number with its reason",
    "wellfed watch --predict": "apply what the finding says to your DataLoader and watch the script again",
    "wellfed completion": 'Hydra has it: eval "$(python src/train.py -sc install=bash)"',
}
"""Dotted knob, option as ``group=option``, command or flag -> what to do instead, a sentence without a full stop."""


def what_instead(name: str) -> str:
    """Returns the message about a knob or option that is gone; empty if there never was one."""
    return f"{name} went in 0.1: {GONE[name]}." if name in GONE else ""
