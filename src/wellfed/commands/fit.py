"""``python -m wellfed fit``: the micro-batch that this device can take, by running steps of a few sizes."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from wellfed.config.compose import Composed, compose
from wellfed.config.schema import RunConfig
from wellfed.errors import EXIT_NOTHING_RUN, EXIT_OK, ConfigError, DataError, Fault
from wellfed.hardware.detect import machine
from wellfed.hardware.facts import GpuFacts, MachineFacts
from wellfed.hardware.torch_cuda import torch_cuda
from wellfed.nvml.session import NvmlError, NvmlSession
from wellfed.planning.run_plan import RunPlan
from wellfed.units import show_gib

if TYPE_CHECKING:
    from wellfed.footprint.size_search import Fit, Probe
    from wellfed.run.planner import Planner

_TARGET = "target_util_pct="
HOST_FRAC = 0.9
"""Of the free host memory, where training runs on the CPU and no card was named."""


def main(argv: Sequence[str]) -> int:
    """Runs up to 6 sizes, a row each, and says which is the one to take; 0, or 2 if not even one sample fits."""
    parser = argparse.ArgumentParser(
        prog="python -m wellfed fit",
        description="The micro-batch that this device can take, by running a few sizes. Leaves nothing behind.",
    )
    parser.add_argument(
        "overrides", nargs="*", help="as for python src/train.py; target_util_pct=85 stops at that mean GPU utilisation"
    )
    parser.add_argument("--json", action="store_true", help="print {micro_batch, stopped_by, because, probes} as JSON")
    asked = parser.parse_intermixed_args(argv)
    target = _target([text for text in asked.overrides if text.startswith(_TARGET)])
    composed: Composed[RunConfig] = compose([text for text in asked.overrides if not text.startswith(_TARGET)])
    show = _Rows(quiet=asked.json)
    # What the workload's code prints is no part of the JSON.
    with contextlib.redirect_stdout(sys.stderr) if asked.json else contextlib.nullcontext():
        found, budget_gib, is_whole = run(composed, target, show)
    if asked.json:
        print(json.dumps({"micro_batch": found.size, **asdict(found), "budget_gib": budget_gib}, indent=2))
    else:
        show.end(found, composed, is_whole=is_whole)
    if found.size is None:
        print(f"{_capital(found.because)} {show_gib(budget_gib)}. See: python -m wellfed plan", file=sys.stderr)
        return EXIT_NOTHING_RUN
    return EXIT_OK


def run(
    composed: Composed[RunConfig], target_util_pct: float | None, on_probe: Callable[[Probe], None]
) -> tuple[Fit, float, bool]:
    """What was found, the budget in GiB, and whether the model's steps are never split.

    Raises:
        ConfigError, DataError: nothing can be run.
    """
    # Torch from here on: --help and a typo need neither.
    import torch

    from wellfed.footprint.footprint import NoEstimate
    from wellfed.footprint.size_fit import CudaMeter, TensorMeter, find_micro_batch
    from wellfed.memory.cap import cap_cuda
    from wellfed.run.planner import Planner
    from wellfed.run.training_step import TrainingStep

    config, facts = composed.config, machine(torch_cuda())
    planner = Planner.start(composed, facts)
    for warning in planner.device.warnings:
        print(f"Warning: {warning}", file=sys.stderr)
    plan = planner.rough()
    _refuse(planner)
    is_whole = planner.model_facts().has_batch_norm
    make_batch = planner.estimate(plan).batches()
    if isinstance(make_batch, NoEstimate):
        raise DataError(f"{make_batch.reason.rstrip('.')}.")
    budget_gib = plan.device.memory_gib if plan.device.memory_gib is not None else HOST_FRAC * facts.ram_available_gib
    on_gpu = plan.on_gpu
    if on_gpu and plan.device.enforce:
        ballast = cap_cuda(int(budget_gib * 2**30), ballast=config.gpu.ballast)  # noqa: F841  held while steps run
    step = TrainingStep(config, plan, planner.parts, torch.device("cuda", 0) if on_gpu else torch.device("cpu"))
    with _utilisation(facts, plan) as utilisation:
        found = find_micro_batch(
            step,
            lambda size: step.place(make_batch(size)),
            budget_gib=budget_gib,
            max_size=math.ceil(config.workload.effective_batch_size / plan.trainer.devices),
            min_size=2 if is_whole else 1,
            target_util_pct=target_util_pct,
            utilisation=utilisation,
            meter=CudaMeter(step.device) if on_gpu else TensorMeter(step.resident),
            on_probe=on_probe,
        )
    return found, budget_gib, is_whole


def _target(typed: Sequence[str]) -> float | None:
    if not typed:
        return None
    text = typed[-1].removeprefix(_TARGET)
    try:
        percent = float(text)
    except ValueError:
        percent = math.nan
    if not 0 < percent <= 100:
        problem = "is a mean GPU utilisation in percent, above 0 and at most 100."
        raise ConfigError([Fault(f"{_TARGET}{text}", problem, "Write target_util_pct=85.")])
    return percent


def _refuse(planner: Planner) -> None:
    """Models whose step is not ours to split."""
    if planner.parts.is_lightning_module:
        problem = "a LightningModule runs its own step on whole batches: there is no micro-batch to find."
        raise ConfigError([Fault("workload.model", problem, "Bring a plain nn.Module with loss(batch).")])


@contextlib.contextmanager
def _utilisation(facts: MachineFacts, plan: RunPlan) -> Iterator[Callable[[], float | None] | None]:
    """A reader of the training card's utilisation, percent; None where NVML does not know it."""
    cards = facts.training_gpus
    if not plan.on_gpu or not cards or cards[0].uuid is None or cards[0].nvml_index is None:
        yield None
        return
    card: GpuFacts = cards[0]
    try:
        with NvmlSession(tries=3) as nvml:
            handle = nvml.ask("nvmlDeviceGetHandleByUUID", card.uuid)

            def read() -> float | None:
                try:
                    return float(nvml.ask("nvmlDeviceGetUtilizationRates", handle).gpu)
                except NvmlError:
                    return None

            yield read
    except NvmlError:
        yield None


class _Rows:
    """A table that grows by a row a probe, so that a slow model is seen to be alive."""

    _FORM = "{:>12}  {:>14}  {:>14}  {:>12}"

    def __init__(self, *, quiet: bool) -> None:
        self._quiet, self._begun = quiet, False

    def __call__(self, probe: Probe) -> None:
        from wellfed.footprint.size_fit import row

        if self._quiet:
            return
        if not self._begun:
            self._begun = True
            print(self._FORM.format("micro-batch", "samples/s", "peak", "utilisation"), flush=True)
        print(self._FORM.format(*row(probe)), flush=True)

    def end(self, found: Fit, composed: Composed[RunConfig], *, is_whole: bool) -> None:
        """The size to take, and what to type."""
        print(f"\nStopped by {found.stopped_by}: {found.because}.")
        if found.size is None:
            return
        if not is_whole:
            print(f"Use it: python src/train.py {_typed(composed, found.size)}")
        elif found.stopped_by != "batch":
            print(
                "A model with BatchNorm is never split: its statistics belong to the whole batch. "
                f"workload.effective_batch_size={found.size} changes what is learned; GroupNorm could be split."
            )


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _typed(composed: Composed[RunConfig], micro_batch: int) -> str:
    """What was typed, with the micro-batch that was found in the place of what said how to split a step."""
    splits = ("memory.micro_batch", "memory.accumulate")
    kept = [text for text in composed.overrides if text.partition("=")[0].lstrip("+~") not in splits]
    kept.append(f"memory.micro_batch={micro_batch}")
    if any(text.partition("=")[0] == "experiment" for text in kept) and composed.config.memory.accumulate is not None:
        kept.append("memory.accumulate=null")
    return shlex.join(kept)
