"""Runs src/train.py as one rank of a run that `scaling.py` times, with a clock around what the ranks do together.

    WELLFED_SCALING=FOLDER python benchmarks/scaling_rank.py [overrides of src/train.py]

Leaves ``rank<n>.json`` in the folder: a row for each step, what the exchange of gradients and the agreements took of
it, how often it called torch.distributed, and how long such gradients take to be summed when nobody is waited for.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from wellfed.config import entry  # noqa: E402
from wellfed.ranks import own_rank  # noqa: E402
from wellfed.run.folder.resume import expand  # noqa: E402
from wellfed.run.train import on_all_ranks, spin_less  # noqa: E402

spin_less(os.environ)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from wellfed.observe.loggers.journal import Journal  # noqa: E402
from wellfed.observe.timing.step_clock import StepRow  # noqa: E402
from wellfed.train.step import replicas as ranks  # noqa: E402
from wellfed.train.step.gradients import buckets as buckets_of  # noqa: E402
from wellfed.train.step.train_step import TrainStep  # noqa: E402

ALONE_STEP, ALONE_TIMES = 2, 20
"""In this step of the warm-up the gradients are summed so often, each time after all ranks have met."""
COLLECTIVES = ("all_reduce", "broadcast", "all_gather", "all_gather_object", "reduce", "barrier", "send", "irecv")


@dataclass
class Notes:
    """Measurements of one rank."""

    step: int = 0
    rows: list[StepRow] = field(default_factory=list)
    gradients: dict[int, list[Any]] = field(default_factory=dict)
    """Milliseconds by step, or two GPU events to be read later."""
    agreements: dict[int, float] = field(default_factory=dict)
    """Milliseconds by step."""
    calls: Counter[str] = field(default_factory=Counter)
    calls_at: dict[int, int] = field(default_factory=dict)
    alone_ms: list[float] = field(default_factory=list)
    gradient_bytes: int = 0
    depth: int = 0
    """Calls of torch.distributed within one another."""
    backend: str | None = None

    def to_json(self) -> str:
        """To be called when the device has done all."""
        known = [row for row in self.rows if not row.warmup]
        first, last = (known[0].step, known[-1].step) if known else (0, 0)
        calls = self.calls_at.get(last, 0) - self.calls_at.get(first, 0)
        return json.dumps(
            {
                "rank": own_rank(),
                "backend": self.backend,
                "gradient_bytes": self.gradient_bytes,
                "calls_per_step": calls / (last - first) if last > first else None,
                "calls": dict(self.calls),
                "alone_ms": self.alone_ms,
                "steps": [
                    {
                        "step": row.step,
                        "samples": row.samples,
                        "step_ms": row.step_ms,
                        "wait_ms": row.wait_ms,
                        "ready": row.ready,
                        "gradients_ms": sum(map(_ms, self.gradients.get(row.step, []))),
                        "agreements_ms": self.agreements.get(row.step, 0.0),
                    }
                    for row in known
                ],
            }
        )


def _ms(told: Any) -> float:
    return float(told[0].elapsed_time(told[1])) if isinstance(told, tuple) else float(told)


def listen(notes: Notes) -> None:
    """Put clocks around the methods of the ranks; nothing that is computed changes."""
    _around(TrainStep, "__call__", functools.partial(_step, notes))
    _around(Journal, "steps", functools.partial(_rows, notes))
    _around(ranks.AgreeingReplicas, "average_gradients", functools.partial(_gradients, notes))
    for kind in (ranks.AgreeingReplicas, ranks._Wrapped):
        for name in ("_exchange", "_reduced"):
            if name in vars(kind):
                _around(kind, name, functools.partial(_agreement, notes))
    for name in COLLECTIVES:
        _around(dist, name, functools.partial(_counted, notes, name))


def _around(place: Any, name: str, how: Callable[..., Any]) -> None:
    inner = getattr(place, name)

    @functools.wraps(inner)
    def call(*arguments: Any, **named: Any) -> Any:
        return how(inner, *arguments, **named)

    setattr(place, name, call)


def _step(notes: Notes, inner: Callable[..., Any], step: TrainStep, delivery: Any) -> Any:
    notes.step = step.number + 1
    if notes.step == ALONE_STEP and dist.is_initialized():
        notes.backend = dist.get_backend()
        _alone(notes, [weight for weight in step.passes.trained if weight.requires_grad])
    found = inner(step, delivery)
    notes.calls_at[notes.step] = sum(notes.calls.values())
    return found


def _rows(notes: Notes, inner: Callable[..., Any], journal: Journal, rows: Iterable[StepRow]) -> Any:
    finished = list(rows)
    notes.rows += finished
    return inner(journal, finished)


def _gradients(notes: Notes, inner: Callable[..., Any], own: ranks.AgreeingReplicas) -> Any:
    """On a GPU: from when the device comes to it until it has the sums, so with the wait for other cards."""
    is_on_gpu, began_s = own._device.type == "cuda", time.perf_counter()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if is_on_gpu else []
    if events:
        events[0].record()
    found = inner(own)
    taken: Any
    if events:
        events[1].record()
        taken = tuple(events)
    else:
        taken = 1e3 * (time.perf_counter() - began_s)
    notes.gradients.setdefault(notes.step, []).append(taken)
    return found


def _agreement(notes: Notes, inner: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """The first rank that comes to it waits for the last."""
    began_s = time.perf_counter()
    found = inner(*arguments, **named)
    taken_ms = 1e3 * (time.perf_counter() - began_s)
    notes.agreements[notes.step] = notes.agreements.get(notes.step, 0.0) + taken_ms
    return found


def _counted(notes: Notes, name: str, inner: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    if notes.depth == 0:  # one that calls another is one
        notes.calls[name] += 1
    notes.depth += 1
    try:
        return inner(*arguments, **named)
    finally:
        notes.depth -= 1


def _alone(notes: Notes, weights: list[torch.nn.Parameter]) -> None:
    """Sum buffers as large as the gradients, in the same pieces, when all ranks are there."""
    device = weights[0].device
    buckets = [
        torch.zeros(sum(each.numel() for each in bucket), dtype=bucket[0].dtype, device=device)
        for bucket in buckets_of([weight.detach() for weight in weights])
    ]
    notes.gradient_bytes = sum(bucket.nbytes for bucket in buckets)
    for number in range(ALONE_TIMES + 2):
        dist.barrier()
        _settle(device)
        began_s = time.perf_counter()
        for bucket in buckets:
            dist.all_reduce(bucket)
        _settle(device)
        if number > 1:
            notes.alone_ms.append(1e3 * (time.perf_counter() - began_s))


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    folder, notes = Path(os.environ["WELLFED_SCALING"]), Notes()
    listen(notes)
    try:  # as src/train.py does; this file is the command line, with which the other ranks are started
        sys.exit(on_all_ranks(lambda job: entry.main("train", job, expand=expand)))
    finally:
        if notes.rows:
            (folder / f"rank{own_rank()}.json").write_text(notes.to_json(), encoding="utf-8")


if __name__ == "__main__":
    main()
