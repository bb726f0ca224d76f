"""Measures what a training step costs beyond plain PyTorch: microseconds and calls a step over a raw loop.

    python benchmarks/loop.py [--model mlp] [--rounds 10] [--steps 1000] [--only raw ours ours_bare] [--out RECORD]
    python benchmarks/loop.py --calls

Seven loops, each in a process of its own, take turns: one makes 50 steps while the others wait for their next batch. So
all meet the same speed of the machine. Each turn has another order; work in other processes counts to no loop:

- `raw`: plain PyTorch;
- `ours`: a whole run as the command line starts it, with all its callbacks, files, progress bar, wandb (offline) and
  telemetry at 2 Hz;
- `ours_bare`: the same with telemetry=none and logger=none;
- `lightning_default`: Lightning with its defaults and one self.log a step;
- `lightning_bare`: Lightning with all of that switched off;
- `fabric`: Lightning's Fabric, which leaves the loop to its user;
- `guest`: a run of the LightningModule of `lightning_default`, with telemetry and a CSV logger. Their weights must be
  equal at the end.

All have the same network, batches from memory, fused AdamW and gradient clipping. A difference is that of two loops of
one round; the first steps of a loop, and of each turn, are dropped. Wall time and CPU time of the training thread are
measured where a batch is fetched.
The mlp shows best what is added; the lstm takes six times as long a step, and the wide one 30 times.

`--calls` counts the calls of Python functions a step instead, by `sys.setprofile`, and lists them by function. A busy
machine does not change these counts. `tests/end_to_end/test_loop.py` holds them to `MOST_CALLS`.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from multiprocessing.connection import Connection
from operator import truediv
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from unittest.mock import patch

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.measuring import compared, counted, finish, interval, turned  # noqa: E402
from wellfed.config.compose import compose  # noqa: E402
from wellfed.contract import Datasets, LossOutput  # noqa: E402
from wellfed.generators import seed_everything  # noqa: E402
from wellfed.observe.timing import step_clock  # noqa: E402
from wellfed.run.train import train  # noqa: E402
from wellfed.train.loop import bar  # noqa: E402

BATCH, WIDTH, CLIP, LR = 32, 64, 1.0, 1e-3
WARMUP = 50
TURN, DROPPED = 50, 5
"""Steps of a turn, and steps before them that are not measured: other processes have emptied the caches."""
MOST_BATCHES = 10_000
"""Batches in memory; longer runs use them again."""
COUNTED, NUM_WINDOWS = 100, 3
"""Steps of a window in which calls are counted, and number of such windows in a run."""
MOST_CALLS = {"ours": -41, "ours_bare": -44}
"""Calls of Python functions that a run may add to a step of plain PyTorch, which has 215. It is below 0, since a run
calls the kernel of a fused Adam without torch's Python around it."""
CALLS_BEFORE = {"ours": 436.1, "ours_bare": 421.4}
"""Calls a step at commit 5986e85d, counted there by this script, adapted to the names of that time."""
_BY_TIME = ("wellfed/observe/loggers/csv_table.py", "wellfed/observe/loggers/journal.py")
"""Code that runs by time and not by steps: writing rows. It is not counted, and the bar is not drawn."""
WORKLOAD = f"""
name: loop
effective_batch_size: {BATCH}
model: {{_target_: benchmarks.loop.%s}}
data: {{_target_: benchmarks.loop.datasets, num_steps: 0}}
optimizer: {{_target_: torch.optim.AdamW, lr: {LR}}}
schedule: {{name: constant}}
"""
GUEST = """
name: loop
model: {_target_: benchmarks.loop.Lit, model: %s, logs: true}
data: {_target_: benchmarks.loop.loaders, num_steps: 0}
"""


class Mlp(nn.Module):
    """Steps of a few hundred microseconds: what the loop adds is seen best."""

    width = WIDTH

    def __init__(self) -> None:
        super().__init__()
        width = self.width
        self.net = nn.Sequential(
            nn.Linear(WIDTH, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
        )

    def loss(self, batch: dict[str, Tensor]) -> LossOutput:
        """Mean squared error."""
        return LossOutput((self.net(batch["x"]) - batch["y"]).square().mean())


class Wide(Mlp):
    """Steps of many milliseconds, nearly all of it in the kernels."""

    width = 1536


class Lstm(nn.Module):
    """Steps of a few milliseconds: a row of the batch is 16 points in time of 4 figures."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.head = nn.LSTM(4, 128, batch_first=True), nn.Linear(128, 1)

    def loss(self, batch: dict[str, Tensor]) -> LossOutput:
        """Mean squared error."""
        states, _ = self.net(batch["x"].view(-1, WIDTH // 4, 4))
        return LossOutput((self.head(states[:, -1]) - batch["y"]).square().mean())


MODELS: dict[str, type[nn.Module]] = {"mlp": Mlp, "lstm": Lstm, "wide": Wide}


class Cost(NamedTuple):
    """Time of one step in microseconds."""

    wall_us: float
    cpu_us: float
    """CPU time of the training thread."""


class Steps:
    """Times and calls of the steps of one loop, from one fetched batch to the next."""

    def __init__(self, *, counts_calls: bool = False, turns: Connection | None = None) -> None:
        """``turns``: after the warm-up, gives the loop its turns and takes the cost of each."""
        self._counts_calls, self._turns = counts_calls, turns
        self._number, self._left = 0, 0
        """Batches fetched, and steps left of the turn."""
        self._began_s: list[float] = []
        self._calls: list[Counter[Any]] = []
        self.weights: Tensor | None = None
        """Weights of a LightningModule at the end of its training."""

    def fetched(self) -> None:
        """Marks that a batch is fetched; called by the training thread."""
        if self._counts_calls:
            sys.setprofile(None)
            if self._number >= WARMUP and len(self._calls) <= NUM_WINDOWS:
                if (self._number - WARMUP) % COUNTED == 0:
                    self._calls.append(Counter())
                sys.setprofile(self._note)
        elif self._turns is not None and self._number >= WARMUP:
            if self._left == TURN:
                self._began_s = [time.perf_counter(), time.thread_time()]
            elif self._left == 0:
                self._end_turn(self._turns)
            self._left -= 1
        self._number += 1

    def _end_turn(self, turns: Connection) -> None:
        if self._began_s:
            ended_s = time.perf_counter(), time.thread_time()
            turns.send(Cost(*(1e6 * (end - begin) / TURN for end, begin in zip(ended_s, self._began_s, strict=True))))
        else:
            turns.send(None)
        if turns.recv():
            self._left = TURN + DROPPED
        else:  # the last turn: the loop goes on to its end
            self._turns = None

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            self._calls[-1][frame.f_code] += 1

    def calls(self) -> dict[str, float]:
        """Returns the calls a step by function, of the window with the fewest; without `_BY_TIME`."""
        found = min(map(_by_function, self._calls[:NUM_WINDOWS]), key=Counter.total)
        return {name: number / COUNTED for name, number in found.most_common()}


def _by_function(calls: Counter[Any]) -> Counter[str]:
    found: Counter[str] = Counter()
    for code, number in calls.items():
        file = code.co_filename.partition("site-packages/")[2] or code.co_filename.rpartition("/src/")[2]
        if not file.startswith(_BY_TIME):
            found[f"{file or code.co_filename}:{code.co_qualname}"] += number
    return found


steps = Steps()
"""Steps of the loop that runs now."""


class Samples:
    """Training data in memory."""

    def __init__(self, num_steps: int) -> None:
        self._num_rows, made = BATCH * num_steps, BATCH * min(num_steps, MOST_BATCHES)
        self._inputs = torch.randn(made, WIDTH, generator=torch.Generator().manual_seed(0))
        self._targets = self._inputs.sum(1, keepdim=True)

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self._inputs[index], "y": self._targets[index]}

    def fetch(self, indices: Tensor, rng: Any = None) -> dict[str, Tensor]:
        """Returns a batch, and marks the start of its step."""
        steps.fetched()
        if self._num_rows > len(self._inputs):
            indices = indices % len(self._inputs)
        return {"x": self._inputs.index_select(0, indices), "y": self._targets.index_select(0, indices)}


def datasets(num_steps: int) -> Datasets:
    """What the run of ours reads."""
    return Datasets(Samples(num_steps))


class Batches:
    """An epoch in random order, for the loops that are not ours."""

    def __init__(self, num_steps: int) -> None:
        self._data, self._num_steps = Samples(num_steps), num_steps

    def __len__(self) -> int:
        return self._num_steps

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for indices in torch.randperm(len(self._data)).split(BATCH):
            yield self._data.fetch(indices)


def loaders(num_steps: int) -> Datasets:
    """What the run of a LightningModule reads."""
    return Datasets(Batches(num_steps))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """As `WORKLOAD` says; the run of ours adds ``fused`` by itself."""
    return torch.optim.AdamW(model.parameters(), lr=LR, fused=True)


def raw(num_steps: int, scratch: Path, model: str = "mlp") -> None:
    """Trains with plain PyTorch."""
    batches, network = Batches(num_steps), MODELS[model]()
    optimizer, parameters = optimizer_of(network), list(network.parameters())
    for batch in batches:
        optimizer.zero_grad()
        network.loss(batch).loss.backward()  # type: ignore[operator]
        nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()


def ours(num_steps: int, scratch: Path, model: str = "mlp", *more: str) -> None:
    """Trains as the command line does, without the ceiling after the training."""
    more = more or ("telemetry.ceiling_steps=0", "logger.mode=offline")
    _run(WORKLOAD % MODELS[model].__name__, num_steps, scratch, "loader.backend=inline", *more)


def guest(num_steps: int, scratch: Path, model: str = "mlp") -> None:
    """Trains the LightningModule of `lightning_default` as the command line does."""
    _run(GUEST % model, num_steps, scratch, "telemetry.ceiling_steps=0", "logger=csv")


def _run(workload: str, num_steps: int, scratch: Path, *more: str) -> None:
    (scratch / "workload").mkdir(exist_ok=True)
    (scratch / "workload" / "loop.yaml").write_text(workload)
    folder = Path(tempfile.mkdtemp(dir=scratch)) / "run"
    overrides = [
        "workload=loop",
        f"workload.data.num_steps={num_steps}",
        "trainer.max_epochs=1",
        "trainer.accelerator=cpu",
        f"trainer.gradient_clip={CLIP}",
        *more,
        f"hydra.run.dir={folder}",
    ]
    code = train(compose(overrides, extra_dirs=[scratch]))
    if code:
        raise RuntimeError(f"the run ended with {code}: {(folder / 'train.log').read_text()}")


def ours_bare(num_steps: int, scratch: Path, model: str = "mlp") -> None:
    """Trains as the command line does, with telemetry and logger switched off."""
    ours(num_steps, scratch, model, "telemetry=none", "telemetry.ceiling_steps=0", "logger=none")


class Lit(pl.LightningModule):
    """The same as a LightningModule."""

    def __init__(self, model: str, logs: bool) -> None:
        super().__init__()
        self.model, self._logs = MODELS[model](), logs

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model.loss(batch).loss  # type: ignore[operator]
        if self._logs:
            self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer_of(self.model)

    def on_train_end(self) -> None:
        steps.weights = nn.utils.parameters_to_vector(self.parameters()).detach()


def lightning_default(num_steps: int, scratch: Path, model: str = "mlp") -> None:
    """Trains with Lightning's own callbacks, progress bar and CSV logger; a row every 50 steps."""
    _lightning(num_steps, scratch, model, logs=True, logger=CSVLogger(scratch))


def lightning_bare(num_steps: int, scratch: Path, model: str = "mlp") -> None:
    """Trains with the Trainer alone, which logs, saves and shows nothing."""
    switches = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    _lightning(num_steps, scratch, model, logs=False, **dict.fromkeys(switches, False))


def _lightning(num_steps: int, scratch: Path, model: str, *, logs: bool, **options: Any) -> None:
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=1, gradient_clip_val=CLIP, default_root_dir=scratch, devices=1, **options
    )
    seed_everything(1)
    trainer.fit(Lit(model, logs), Batches(num_steps))


def fabric(num_steps: int, scratch: Path, model: str = "mlp") -> None:
    """Trains with Lightning's Fabric."""
    from lightning.fabric import Fabric

    runs = Fabric(accelerator="cpu", devices=1)
    network = MODELS[model]()
    module, optimizer = runs.setup(network, optimizer_of(network))
    module.mark_forward_method("loss")
    for batch in Batches(num_steps):
        optimizer.zero_grad()
        runs.backward(module.loss(batch).loss)
        runs.clip_gradients(module, optimizer, max_norm=CLIP)
        optimizer.step()


LOOPS: dict[str, Callable[..., None]] = {
    loop.__name__: loop for loop in (raw, ours, ours_bare, lightning_default, lightning_bare, fabric, guest)
}


OURS = {"ours": "everything on", "ours_bare": "telemetry and logger off"}
WHOLE_STEPS = {"raw": "plain PyTorch", "fabric": "Lightning Fabric"}
ADDED = {"lightning_default": "Lightning, its defaults", "lightning_bare": "Lightning, all switched off"}
"""Loops that are compared by their steps, and by what they add to plain PyTorch."""


def watched(
    name: str,
    num_steps: int,
    scratch: Path,
    model: str = "mlp",
    *,
    counts_calls: bool = False,
    turns: Connection | None = None,
) -> Steps:
    """Runs a loop, and returns its steps."""
    global steps  # noqa: PLW0603  the data set of a loop is made by its run, and has no other way to them
    steps = Steps(counts_calls=counts_calls, turns=turns)
    try:
        LOOPS[name](num_steps, scratch, model)
    finally:
        if counts_calls:
            sys.setprofile(None)
    return steps


@contextmanager
def prepared() -> Iterator[Path]:
    """One torch thread, a terminal that shows nobody anything, and a folder; all as before afterwards."""
    threads, environ = torch.get_num_threads(), dict(os.environ)
    torch.set_num_threads(1)
    os.environ["FORCE_COLOR"] = "1"  # rich takes what it writes to for a terminal: the bar is drawn
    try:
        with (
            tempfile.TemporaryDirectory() as scratch,
            open(os.devnull, "w") as nowhere,
            redirect_stdout(nowhere),
            redirect_stderr(nowhere),
        ):
            yield Path(scratch)
    finally:
        torch.set_num_threads(threads)
        os.environ.clear()
        os.environ.update(environ)


def measure(names: list[str], rounds: int, num_steps: int, model: str = "mlp") -> dict[str, list[Cost]]:
    """Returns the cost of a step of each loop, one figure a round.

    Args:
        num_steps: steps of a round, which are several turns.
    """
    found: dict[str, list[Cost]] = {name: [] for name in names}
    turns_of_round = max(1, num_steps // TURN)
    most = WARMUP + (rounds * turns_of_round + 1) * (TURN + DROPPED) + 10
    context = multiprocessing.get_context("fork")
    with prepared() as scratch, ExitStack() as loops:
        connections = {}
        for name in names:
            connections[name], theirs = context.Pipe()
            process = context.Process(target=_take_turns, args=(name, most, scratch, model, theirs), daemon=True)
            process.start()
            theirs.close()
            loops.callback(process.terminate)
            connections[name].recv()  # it is warm
        for number in range(rounds):
            costs: dict[str, list[Cost]] = {name: [] for name in names}
            for turn in range(turns_of_round):
                order = turned(names, number + turn // 2)
                for name in order if turn % 2 == 0 else reversed(order):  # no loop always follows the same one
                    connections[name].send(True)
                    costs[name].append(connections[name].recv())
            for name, own in costs.items():
                found[name].append(Cost(*map(statistics.fmean, zip(*own, strict=True))))
        weights = {}
        for name, connection in connections.items():
            connection.send(False)
            weights[name] = connection.recv()
    one, other = weights.get("guest"), weights.get("lightning_default")
    if one is not None and other is not None and not (one == other).all():
        raise RuntimeError("A LightningModule ends with other weights than under Lightning's Trainer.")
    return found


def _take_turns(name: str, num_steps: int, scratch: Path, model: str, turns: Connection) -> None:
    """Runs a loop in this process, in turns with others; sends the weights of a LightningModule at its end."""
    own = scratch / name
    own.mkdir()
    weights = watched(name, num_steps, own, model, turns=turns).weights
    turns.send(None if weights is None else weights.numpy())  # a tensor would lie in memory of this process


def calls_a_step(names: list[str], model: str = "mlp") -> dict[str, dict[str, float]]:
    """Returns the calls of Python functions a step of each loop, by function."""
    num_steps = WARMUP + COUNTED * NUM_WINDOWS + 5
    by_time = patch.object(bar, "REDRAW_S", math.inf), patch.object(step_clock, "WINDOW_S", math.inf)
    with prepared() as scratch, by_time[0], by_time[1]:
        return {name: watched(name, num_steps, scratch, model, counts_calls=True).calls() for name in names}


def over_raw(found: dict[str, list[Cost]], name: str, clock: str = "wall_us") -> list[float]:
    """Returns the microseconds a step beyond the raw loop of the same round."""
    return [getattr(own, clock) - getattr(base, clock) for own, base in zip(found[name], found["raw"], strict=True)]


def result(name: str, found: dict[str, list[Cost]]) -> dict[str, Any]:
    """Returns the row of a loop in the record."""
    wall, over, over_cpu = (
        [cost.wall_us for cost in found[name]],
        over_raw(found, name),
        over_raw(found, name, "cpu_us"),
    )
    return {
        "loop": name,
        "n": len(wall),
        "us_per_step_median": statistics.median(wall),
        "us_per_step_ci95": interval(wall),
        "over_raw_us_median": statistics.median(over),
        "over_raw_us_ci95": interval(over),
        "over_raw_cpu_us_median": statistics.median(over_cpu),
        "over_raw_cpu_us_ci95": interval(over_cpu),
        "x_raw_median": statistics.median(map(truediv, wall, [cost.wall_us for cost in found["raw"]])),
    }


def said(row: dict[str, Any]) -> str:
    """Returns the row of a loop as a text."""
    low, high = row["over_raw_us_ci95"] or [row["over_raw_us_median"]] * 2
    return (
        f"{row['loop']} {row['us_per_step_median']:.0f} us a step, {row['over_raw_us_median']:.0f} over plain PyTorch "
        f"({low:.0f} to {high:.0f}, x {row['x_raw_median']:.2f}; CPU {row['over_raw_cpu_us_median']:.0f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="mlp")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=1000, help="steps of a round")
    parser.add_argument("--only", nargs="+", choices=LOOPS, default=list(LOOPS))
    parser.add_argument("--calls", action="store_true", help="count and list calls of Python functions")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    names = ["raw", *(name for name in chosen.only if name != "raw")]
    calls = calls_a_step(names, chosen.model)
    for name in names if chosen.calls else ():
        print(f"{name}: {sum(calls[name].values()):.1f} calls a step")
        for function, number in calls[name].items():
            print(f"  {number:7.2f} {function}")
    if chosen.calls:
        return
    found = measure(names, chosen.rounds, chosen.steps, chosen.model)
    results = [result(name, found) for name in names]
    for row in results:
        row["calls"] = sum(calls[row["loop"]].values())
        row["calls_over_raw"] = row["calls"] - results[0]["calls"]
    config = {
        "model": chosen.model,
        "batch": BATCH,
        "width": WIDTH,
        "gradient_clip": CLIP,
        "optimizer": "AdamW(fused)",
        "log_every_steps": 50,
        "steps": chosen.steps,
        "warmup_steps": WARMUP,
        "threads": 1,
        "terminal": "forced, written to /dev/null",
    }
    says = "; ".join(f"{said(row)}, {row['calls_over_raw']:.0f} calls of functions more" for row in results[1:])
    says += f"; plain PyTorch ({chosen.model}) takes {results[0]['us_per_step_median']:.0f} us."
    finish("loop", results, says, chosen.out, config=config, compared=rows_of(found, calls, chosen.model))


def rows_of(
    found: dict[str, list[Cost]], calls: dict[str, dict[str, float]], model: str = "mlp"
) -> list[dict[str, Any]]:
    """Returns the comparisons of steps, of what each loop adds to plain PyTorch, and of the calls of functions."""
    rows: list[dict[str, Any]] = []
    raw_ms = statistics.median(cost.wall_us for cost in found["raw"]) / 1000
    of_ms = "" if model == "mlp" else f" of {raw_ms:.0f} ms"
    for name, title in OURS.items():
        if name not in found:
            continue
        steps_us = {each: [cost.wall_us for cost in found[each]] for each in found}
        peers = {peer: steps_us[each] for each, peer in WHOLE_STEPS.items() if each in found}
        rows += compared(f"a step{of_ms}, {title}", "us", steps_us[name], peers, less_is_better=True)
        added_us = {each: [max(1.0, value) for value in over_raw(found, each)] for each in found}
        peers = {peer: added_us[each] for each, peer in ADDED.items() if each in found}
        rows += compared(f"added to a step, {title}", "us", added_us[name], peers, less_is_better=True)
        if model == "mlp":
            rows += _rows_of_calls(name, calls)
    if {"guest", "lightning_default"} <= found.keys():
        own, theirs = ([cost.wall_us for cost in found[name]] for name in ("guest", "lightning_default"))
        what = f"a step{of_ms} of a LightningModule"
        rows += compared(what, "us", own, {"Lightning's Trainer": theirs}, less_is_better=True)
    return rows


def _rows_of_calls(name: str, calls: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    """Returns rows of counts, which have no interval."""
    theirs = {peer: sum(calls[each].values()) for each, peer in (WHOLE_STEPS | ADDED).items() if each in calls}
    theirs["wellfed 5986e85d"] = CALLS_BEFORE[name]
    return counted(f"calls of Python functions a step, {OURS[name]}", sum(calls[name].values()), theirs)


if __name__ == "__main__":
    from benchmarks import loop  # the module that the workload names, with its one `steps`

    loop.main()
