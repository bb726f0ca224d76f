"""Are the phases of a step right, and what does timing them cost? Forward, backward and optimizer against other clocks.

    python benchmarks/phases.py [--steps 25] [--rounds 6] [--out RECORD]

The steps are those of a run (`TrainStep` with `StepClock`), on the device that is there, with batches that are on it.

- `by_hand`: the same steps in a plain loop, in turns with ours. Each phase lies between two reads of the host's clock.
  On a GPU the loop waits for it at each boundary, so the two agree if the GPU is the limit, and not the host. Ratios
  are ours over by hand: median, lowest and highest of the rounds.
- `by_profiler` (GPU): `torch.profiler` records further steps. A kernel belongs to the phase in which the host launched
  it. Ratios are the time between our events over the time of these kernels. 1 = the phase is nothing but its kernels.
  More = the GPU also waited, for launches or for the profiler. `ratio_of_span`: over the time from the phase's first
  kernel to the first of the next phase, which has these waits, too.
- `cost`: CPU time of the training thread in microseconds a step, in turns: median, lowest, highest. The clock's calls
  alone, without phases, as in a run, and with the phases of every step. Then the difference that marks make to a real
  loop of small steps. On a GPU also single calls on events.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.measuring import finish  # noqa: E402
from wellfed.batches import Delivery  # noqa: E402
from wellfed.contract import LossOutput  # noqa: E402
from wellfed.observe.hardware.facts import SIMULATED  # noqa: E402
from wellfed.observe.timing import step_clock  # noqa: E402
from wellfed.observe.timing.step_clock import BACKWARD, COMPUTE_PHASES, FORWARD, OPTIMIZER, OTHER, StepRow  # noqa: E402
from wellfed.observe.timing.trace_figures import length_us, spans, union  # noqa: E402
from wellfed.train.lightning.trainer import clock_of  # noqa: E402
from wellfed.train.memory.step_down import Fallbacks, MicroBatches  # noqa: E402
from wellfed.train.step.compiled import Loss  # noqa: E402
from wellfed.train.step.micro_batches import Preparation  # noqa: E402
from wellfed.train.step.precision import Precision  # noqa: E402
from wellfed.train.step.step_passes import Computation  # noqa: E402
from wellfed.train.step.train_step import StepSettings, TrainStep  # noqa: E402

WARMUP, PROFILED = 5, 8
"""Steps that are dropped, and steps that the profiler records."""
RANGE = "phase:"
CASES: dict[str, dict[str, Any]] = {
    "small": {"width": 64, "layers": 2, "batch": 32, "micro": 32, "precision": "32-true"},
    "large": {"width": 2048, "layers": 8, "batch": 4096, "micro": 4096, "precision": "32-true"},
    "accumulated": {"width": 2048, "layers": 8, "batch": 4096, "micro": 1024, "precision": "32-true"},
    "scaled": {"width": 2048, "layers": 8, "batch": 4096, "micro": 4096, "precision": "16-mixed"},
}
ON_CPU = {"width": 256, "batch": 512}
"""Sizes of the larger cases on a CPU and on a simulated card."""


class Net(nn.Module):
    """Linear layers with a residual, as large as the case wants them."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def loss(self, batch: dict[str, Tensor]) -> LossOutput:
        x = batch["x"]
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return LossOutput((x - batch["y"]).square().mean())


class Subject:
    """A model with its step, its clock and one batch on the device."""

    def __init__(self, case: dict[str, Any], device: torch.device) -> None:
        torch.manual_seed(0)
        self.device, self.micro = device, case["micro"]
        self.model = Net(case["width"], case["layers"]).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.precision = Precision.for_training(case["precision"], device.type)
        self.batch = {name: torch.randn(case["batch"], case["width"], device=device) for name in ("x", "y")}
        loss = Loss(self.model, "none", lambda message: None)
        computation = Computation(self.model, loss, Preparation(None, 0), self.precision, device)
        fallbacks = Fallbacks(MicroBatches(self.micro))
        self.step = TrainStep(computation, self.optimizer, fallbacks, StepSettings(gradient_clip=1.0))
        self.number = 0

    @contextmanager
    def timed(self, *, marks: bool = True) -> Iterator[step_clock.StepClock]:
        """Attaches a new clock to the step, with or without the marks of phases."""
        clock, passes = clock_of(self.device), self.step.passes
        clock.interrupt()
        before = passes.mark, passes.now_s
        if marks:
            passes.mark, passes.now_s = clock.mark, clock.now_s
        try:
            yield clock
        finally:
            passes.mark, passes.now_s = before

    def ours(self, clock: step_clock.StepClock) -> None:
        """Makes a step as a run does."""
        clock.ask()
        delivery = Delivery(dict(self.batch), 0, self.number, len(self.batch["x"]), is_on_device=True)
        clock.got()
        clock.copy_begins(0)
        clock.copied()
        self.step(delivery)
        self.number += 1
        clock.end(step=self.number, samples=delivery.total, micro_batch=self.micro, num_micro=1)

    def by_hand(self, wait: Callable[[], None]) -> dict[str, float]:
        """Makes the same step in plain PyTorch; returns the milliseconds of each phase."""
        spent = dict.fromkeys(COMPUTE_PHASES, 0.0)
        scaler = self.precision.scaler
        self.optimizer.zero_grad(set_to_none=True)
        parts = [dict(zip(self.batch, part, strict=True)) for part in zip(*self._split(), strict=True)]
        wait()
        for part in parts:
            begun = time.perf_counter()
            with torch.autocast(self.device.type, torch.float16, enabled=scaler is not None, cache_enabled=False):
                loss = self.model.loss(part).loss / len(parts)
            wait()
            middle = time.perf_counter()
            (loss if scaler is None else scaler.scale(loss)).backward()
            wait()
            spent["forward"] += 1e3 * (middle - begun)
            spent["backward"] += 1e3 * (time.perf_counter() - middle)
        begun = time.perf_counter()
        if scaler is not None:
            scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if scaler is None:
            self.optimizer.step()
        else:
            scaler.step(self.optimizer)
            scaler.update()
        wait()
        spent["optimizer"] = 1e3 * (time.perf_counter() - begun)
        return spent

    def _split(self) -> list[tuple[Tensor, ...]]:
        return [tensor.split(self.micro) for tensor in self.batch.values()]


def phases_of(rows: Sequence[StepRow], *, on_gpu: bool) -> dict[str, float]:
    """Returns the median milliseconds of each phase on the device's clock, or else the host's."""
    names = {name: f"device_{name}_ms" if on_gpu else f"{name}_ms" for name in COMPUTE_PHASES}
    return {name: statistics.median(getattr(row, column) for row in rows) for name, column in names.items()}


def against_hand(subject: Subject, wait: Callable[[], None], rounds: int, steps: int) -> dict[str, Any]:
    """Compares steps in turns."""
    on_gpu, ratios, ours_ms = subject.device.type == "cuda", defaultdict(list), defaultdict(list)
    for number in range(rounds + 1):
        by_hand = []
        with subject.timed() as clock:
            for _ in range(steps):
                subject.ours(clock)
                by_hand.append(subject.by_hand(wait))
                clock.interrupt()
            rows = clock.rows(wait=True)
        ours = phases_of(rows, on_gpu=on_gpu)
        for name in COMPUTE_PHASES if number else ():  # the first round warms up
            ratios[name].append(ours[name] / statistics.median(one[name] for one in by_hand))
            ours_ms[name].append(ours[name])
    compute_ms = statistics.median(row.compute_ms for row in rows)
    return {
        "ms": {name: statistics.median(found) for name, found in ours_ms.items()},
        "other_ms": compute_ms - sum(ours.values()),
        "ratio": {name: [statistics.median(found), *_ends(found)] for name, found in ratios.items()},
    }


def against_profiler(subject: Subject, wait: Callable[[], None]) -> dict[str, Any]:
    """Compares events with the kernels that torch's profiler records in the same steps."""
    names = {FORWARD: "forward", BACKWARD: "backward", OPTIMIZER: "optimizer", OTHER: "other"}
    with subject.timed() as clock:
        passes, mark = subject.step.passes, clock.mark
        open_range: list[Any] = []

        def marked(given: step_clock.Mark) -> None:
            """Begins a phase, and a range of the profiler with its name."""
            while open_range:
                open_range.pop().__exit__(None, None, None)
            mark(given)
            open_range.append(torch.profiler.record_function(f"{RANGE}{names[given[0]]}").__enter__())

        passes.mark = marked
        for _ in range(WARMUP):
            subject.ours(clock)
        wait()
        clock.rows(wait=True)
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profiler:
            for _ in range(PROFILED):
                subject.ours(clock)
            wait()
        while open_range:
            open_range.pop().__exit__(None, None, None)
        rows = clock.rows(wait=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        found = list(spans(path))
    kernels_ms, span_ms = _of_trace(found)
    ours = {name: sum(getattr(row, f"device_{name}_ms") for row in rows) for name in COMPUTE_PHASES}
    return {
        "kernels_ms_per_step": {name: kernels_ms[name] / PROFILED for name in COMPUTE_PHASES},
        "ratio": {name: _over(ours[name], kernels_ms[name]) for name in COMPUTE_PHASES},
        "ratio_of_span": {name: _over(ours[name], span_ms[name]) for name in COMPUTE_PHASES},
    }


def _over(one: float, other: float) -> float | None:
    return one / other if other > 0 else None


def _of_trace(found: Sequence[Any]) -> tuple[dict[str, float], dict[str, float]]:
    """Returns the milliseconds of kernels by phase, and from each phase's first kernel to that of the next."""
    ranges = sorted(
        (one.start_us, one.end_us, one.name.removeprefix(RANGE))
        for one in found
        if one.kind == "user_annotation" and one.name.startswith(RANGE)
    )
    launched = {one.correlation: one.start_us for one in found if one.kind in ("cuda_runtime", "cuda_driver")}
    work = [one for one in found if one.kind in ("kernel", "gpu_memcpy", "gpu_memset") and one.correlation in launched]
    inside: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for one in work:
        at_us = launched[one.correlation]
        place = next((place for place, (begin, end, _) in enumerate(ranges) if begin <= at_us < end), None)
        if place is not None:
            inside[place].append((one.start_us, one.end_us))
    kernels_ms: dict[str, float] = defaultdict(float)
    span_ms: dict[str, float] = defaultdict(float)
    places = sorted(inside)
    for place, following in zip(places, [*places[1:], None], strict=True):
        name = ranges[place][2]
        kernels_ms[name] += length_us(union(inside[place])) / 1e3
        ends_us = max(end for _, end in inside[place])
        if following is not None and name != "optimizer":  # the next step's copy and splitting lie behind it
            ends_us = min(start for start, _ in inside[following])
        span_ms[name] += (ends_us - min(start for start, _ in inside[place])) / 1e3
    return kernels_ms, span_ms


def cost(subject: Subject, wait: Callable[[], None], rounds: int, steps: int) -> dict[str, Any]:
    """Measures what the clock takes of the host, by turns."""
    kinds = {
        "no_phases": partial(_clock_us, subject.device, marks=False),
        "as_in_a_run": partial(_clock_us, subject.device, marks=True),
        "every_step_timed": partial(_clock_us, subject.device, marks=True, most_apart=1),
    }
    taken: dict[str, list[float]] = defaultdict(list)
    for number in range(rounds + 1):
        for name, measured in kinds.items():
            us = measured(20 * steps)
            if number:
                taken[name].append(us)
    found: dict[str, Any] = {f"{name}_us": [statistics.median(us), *_ends(us)] for name, us in taken.items()}
    extra = [_loop_us(subject, wait, 5 * steps) for _ in range(rounds + 1)][1:]
    found["real_loop_cpu_us"] = statistics.median(one[0] for one in extra)
    return {
        **found,
        **({"calls_us": _calls_us(subject.device)} if subject.device.type == "cuda" else {}),
        "real_loop_extra_cpu_us": [statistics.median(one[1] for one in extra), *_ends([one[1] for one in extra])],
        "n": rounds,
    }


def _ends(values: Sequence[float]) -> list[float]:
    return [min(values), max(values)]


def _calls_us(device: torch.device) -> dict[str, float]:
    """Returns the thread's microseconds of single calls on events, with the current stream looked up or given."""
    stream, new = torch.cuda.current_stream(device), partial(torch.cuda.Event, enable_timing=True)
    first, last = new(), new()
    first.record(), last.record()
    torch.cuda.synchronize(device)
    calls: dict[str, Callable[[], Any]] = {
        "new": new,
        "record": first.record,
        "record_on_stream": partial(first.record, stream),
        "query": last.query,
        "elapsed_time": partial(first.elapsed_time, last),
    }
    found = {}
    for name, call in calls.items():
        torch.cuda.synchronize(device)
        begun = time.thread_time()
        for _ in range(2000):
            call()
        found[name] = 1e6 * (time.thread_time() - begun) / 2000
        first.record(), last.record()
    return found


def _clock_us(device: torch.device, steps: int, *, marks: bool, most_apart: int = step_clock.MOST_APART) -> float:
    """Returns the thread's microseconds a step in the clock's calls alone, reading the rows included."""
    before, step_clock.MOST_APART = step_clock.MOST_APART, most_apart
    try:
        clock = clock_of(device)
        clock.interrupt()
        mark, now_s = clock.mark, clock.now_s
        begun = time.thread_time()
        for number in range(steps):
            clock.ask()
            clock.got()
            clock.copy_begins(0)
            clock.copied()
            if marks:
                mark((FORWARD, now_s()))
                mark((BACKWARD, now_s()))
                mark((OPTIMIZER, now_s()))
                mark((OTHER, now_s()))
            if clock.end(step=number, samples=1, micro_batch=1, num_micro=1):
                clock.rows()
        taken_s = time.thread_time() - begun
        clock.rows()
    finally:
        step_clock.MOST_APART = before
    return 1e6 * taken_s / steps


def _loop_us(subject: Subject, wait: Callable[[], None], steps: int) -> tuple[float, float]:
    """Returns the CPU time of this thread a step in a loop of real steps, and what marking phases adds to it."""
    taken = {}
    for marks in (False, True):
        with subject.timed(marks=marks) as clock:
            wait()
            begun = time.thread_time()
            for number in range(steps):
                subject.ours(clock)
                if number % step_clock.WINDOW_STEPS == 0:
                    clock.rows()
            taken[marks] = time.thread_time() - begun
            wait()
            clock.rows(wait=True)
    return 1e6 * taken[True] / steps, 1e6 * (taken[True] - taken[False]) / steps


def measured(name: str, device: torch.device, rounds: int, steps: int) -> dict[str, Any]:
    """Returns all figures of a case."""
    case, on_gpu = dict(CASES[name]), device.type == "cuda"
    is_real = on_gpu and not torch.cuda.get_device_name(device).startswith(SIMULATED)
    if not is_real and name != "small":
        part = case["micro"] / case["batch"]
        case |= {**ON_CPU, "micro": round(part * ON_CPU["batch"])}
    wait = partial(torch.cuda.synchronize, device) if on_gpu else lambda: None
    before, step_clock.MOST_APART = step_clock.MOST_APART, 1  # all steps are compared
    try:
        subject = Subject(case, device)
        found: dict[str, Any] = {"sizes": case, "by_hand": against_hand(subject, wait, rounds, steps)}
        if is_real:
            found["by_profiler"] = against_profiler(subject, wait)
    finally:
        step_clock.MOST_APART = before
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=25, help="steps of a block")
    parser.add_argument("--rounds", type=int, default=6, help="blocks of each kind, in turns")
    parser.add_argument("--only", nargs="+", choices=CASES, default=[*CASES])
    parser.add_argument("--out", type=Path, help="record to write")
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)
    results: list[dict[str, Any]] = []
    for name in given.only:
        results.append({"case": name, **measured(name, device, given.rounds, given.steps)})
        print(json.dumps(results[-1]), flush=True)
    wait = partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    found = cost(Subject(CASES["small"], device), wait, given.rounds, given.steps)
    results.append({"case": "cost", **found})
    print(json.dumps(results[-1]), flush=True)
    says = (
        f"The step clock costs the host {found['as_in_a_run_us'][0]:.1f} us a step, {found['no_phases_us'][0]:.1f} "
        f"without phases, and {found['every_step_timed_us'][0]:.1f} if the phases of every step were timed."
    )
    config = {"device": device.type, "steps": given.steps, "rounds": given.rounds}
    theme = "phases of a step against other clocks, and the cost of timing them"
    finish(theme, results, says, given.out, config=config)


if __name__ == "__main__":
    main()
