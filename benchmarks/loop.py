"""What does a training step cost beyond plain PyTorch? A small network, us a step over a raw loop.

    python benchmarks/loop.py [--model mlp] [--rounds 10] [--steps 2000] [--out RECORD]

Four loops take turns within one process, in another order each round: plain PyTorch; a whole run as the command line
starts it, with all its callbacks, files, progress bar, wandb (offline) and telemetry at 2 Hz; Lightning with its
defaults and one self.log a step; Lightning with all of that switched off. All have the same network, batches from
memory, fused AdamW and gradient clipping. A difference is that of two loops of one round; first steps are dropped.
The mlp shows best what is added; the lstm, six times as long a step, how little that is to a network that works.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.write_record import write_record  # noqa: E402
from wellfed.config.compose import compose  # noqa: E402
from wellfed.contract import Datasets, LossOutput  # noqa: E402
from wellfed.observe.hardware.detect import machine  # noqa: E402
from wellfed.observe.timing.interval import student_t_975  # noqa: E402
from wellfed.record import git_state  # noqa: E402
from wellfed.run.train import train  # noqa: E402

BATCH, WIDTH, CLIP, LR = 32, 64, 1.0, 1e-3
WARMUP = 50
WORKLOAD = f"""
name: loop
effective_batch_size: {BATCH}
model: {{_target_: benchmarks.loop.%s}}
data: {{_target_: benchmarks.loop.datasets, num_steps: 0}}
optimizer: {{_target_: torch.optim.AdamW, lr: {LR}}}
schedule: {{name: constant}}
"""


class Mlp(nn.Module):
    """Steps of a few hundred microseconds: what the loop adds is seen best."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1)
        )

    def loss(self, batch: dict[str, Tensor]) -> LossOutput:
        """Mean squared error."""
        return LossOutput((self.net(batch["x"]) - batch["y"]).square().mean())


class Lstm(nn.Module):
    """Steps of a few milliseconds: a row of the batch is 16 points in time of 4 figures."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.head = nn.LSTM(4, 128, batch_first=True), nn.Linear(128, 1)

    def loss(self, batch: dict[str, Tensor]) -> LossOutput:
        """Mean squared error."""
        states, _ = self.net(batch["x"].view(-1, WIDTH // 4, 4))
        return LossOutput((self.head(states[:, -1]) - batch["y"]).square().mean())


MODELS: dict[str, type[nn.Module]] = {"mlp": Mlp, "lstm": Lstm}


class Samples:
    """Training data in memory."""

    def __init__(self, num_steps: int) -> None:
        self._inputs = torch.randn(BATCH * num_steps, WIDTH, generator=torch.Generator().manual_seed(0))
        self._targets = self._inputs.sum(1, keepdim=True)

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self._inputs[index], "y": self._targets[index]}

    def fetch(self, indices: Tensor, rng: Any = None) -> dict[str, Tensor]:
        """A batch."""
        return {"x": self._inputs.index_select(0, indices), "y": self._targets.index_select(0, indices)}


def datasets(num_steps: int) -> Datasets:
    """What the run of ours reads."""
    return Datasets(Samples(num_steps))


class Batches:
    """An epoch in random order, for the loops that are not ours; knows when the steps after the warm-up began."""

    def __init__(self, num_steps: int) -> None:
        self._data, self._num_steps = Samples(num_steps), num_steps
        self._asked_at_s: list[float] = []

    def __len__(self) -> int:
        return self._num_steps

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        self._asked_at_s = []
        for indices in torch.randperm(len(self._data)).split(BATCH):
            self._asked_at_s.append(time.perf_counter())
            yield self._data.fetch(indices)

    def us_per_step(self) -> float:
        """From the end of the warm-up to the last batch."""
        return 1e6 * (self._asked_at_s[-1] - self._asked_at_s[WARMUP]) / (self._num_steps - 1 - WARMUP)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """As `WORKLOAD` says; the run of ours adds ``fused`` by itself."""
    return torch.optim.AdamW(model.parameters(), lr=LR, fused=True)


def raw(num_steps: int, scratch: Path, model: str = "mlp") -> float:
    """Plain PyTorch."""
    batches, network = Batches(num_steps), MODELS[model]()
    optimizer, parameters = optimizer_of(network), list(network.parameters())
    for batch in batches:
        optimizer.zero_grad()
        network.loss(batch).loss.backward()  # type: ignore[operator]
        nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
    return batches.us_per_step()


def ours(num_steps: int, scratch: Path, model: str = "mlp") -> float:
    """The command line's run, without the parts before and after the training."""
    (scratch / "workload").mkdir(exist_ok=True)
    (scratch / "workload" / "loop.yaml").write_text(WORKLOAD % MODELS[model].__name__)
    folder = Path(tempfile.mkdtemp(dir=scratch)) / "run"
    overrides = [
        "workload=loop",
        "loader.backend=inline",
        f"workload.data.num_steps={num_steps}",
        "config.allow_targets=[torch,wellfed,workloads,benchmarks]",
        "trainer.max_epochs=1",
        "trainer.accelerator=cpu",
        f"trainer.gradient_clip={CLIP}",
        "telemetry.ceiling_steps=0",
        "logger.mode=offline",
        f"hydra.run.dir={folder}",
    ]
    code = train(compose(overrides, extra_dirs=[scratch]))
    if code:
        raise RuntimeError(f"the run ended with {code}: {(folder / 'train.log').read_text()}")
    with (folder / "steps.csv").open(newline="") as stream:
        end_s = [float(row["time_s"]) for row in csv.DictReader(stream)]
    return 1e6 * (end_s[-1] - end_s[WARMUP]) / (len(end_s) - 1 - WARMUP)


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


def lightning_default(num_steps: int, scratch: Path, model: str = "mlp") -> float:
    """Lightning's own callbacks, progress bar and CSV logger; a row every 50 steps."""
    return _lightning(num_steps, scratch, model, logs=True, logger=CSVLogger(scratch))


def lightning_bare(num_steps: int, scratch: Path, model: str = "mlp") -> float:
    """The Trainer alone: logs nothing, saves nothing, shows nothing."""
    switches = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    return _lightning(num_steps, scratch, model, logs=False, **dict.fromkeys(switches, False))


def _lightning(num_steps: int, scratch: Path, model: str, *, logs: bool, **options: Any) -> float:
    batches = Batches(num_steps)
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=1, gradient_clip_val=CLIP, default_root_dir=scratch, devices=1, **options
    )
    trainer.fit(Lit(model, logs), batches)
    return batches.us_per_step()


LOOPS: dict[str, Callable[..., float]] = {
    loop.__name__: loop for loop in (raw, ours, lightning_default, lightning_bare)
}


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


def measure(names: list[str], rounds: int, num_steps: int, model: str = "mlp") -> dict[str, list[float]]:
    """us a step of each loop, one figure a round; a round before them is dropped."""
    found: dict[str, list[float]] = {name: [] for name in names}
    with prepared() as scratch:
        for number in range(rounds + 1):
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                us = LOOPS[name](num_steps if number else WARMUP + 10, scratch, model)
                if number:
                    found[name].append(us)
    return found


def over_raw(found: dict[str, list[float]], name: str) -> list[float]:
    """us a step beyond the raw loop of the same round."""
    return [us - raw_us for us, raw_us in zip(found[name], found["raw"], strict=True)]


def interval(values: list[float]) -> list[float]:
    """95 % interval of the mean."""
    half = student_t_975(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return [statistics.fmean(values) - half, statistics.fmean(values) + half]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="mlp")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    facts, load_before = machine(), os.getloadavg()
    raw_us = measure(list(LOOPS), chosen.rounds, chosen.steps, chosen.model)
    results = []
    for name, values in raw_us.items():
        over = over_raw(raw_us, name)
        results.append(
            {
                "loop": name,
                "n": len(values),
                "us_per_step_median": statistics.median(values),
                "us_per_step_ci95": interval(values),
                "over_raw_us_median": statistics.median(over),
                "over_raw_us_ci95": interval(over),
                "x_raw_median": statistics.median(us / base for us, base in zip(values, raw_us["raw"], strict=True)),
                "of_lightning_default_median": statistics.median(
                    us / most for us, most in zip(over, over_raw(raw_us, "lightning_default"), strict=True)
                ),
            }
        )
    shown = {result["loop"]: result for result in results}
    record = {
        "theme": "loop",
        "date": datetime.now(UTC).date().isoformat(),
        "command": f"python benchmarks/loop.py --model {chosen.model} --rounds {chosen.rounds} --steps {chosen.steps} "
        "--out RECORD",
        "git": {key: value for key, value in (git_state(ROOT) or {}).items() if key != "diff"},
        "machine": {"load_before": load_before, "load": os.getloadavg(), **facts.to_dict()},
        "config": {
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
        },
        "results": results,
        "raw": raw_us,
        "says": "; ".join(
            f"{name} {shown[name]['us_per_step_median']:.0f} us a step, "
            f"{shown[name]['over_raw_us_median']:.0f} over plain PyTorch "
            f"({shown[name]['over_raw_us_ci95'][0]:.0f} to {shown[name]['over_raw_us_ci95'][1]:.0f}, "
            f"x {shown[name]['x_raw_median']:.2f}, "
            f"{shown[name]['of_lightning_default_median']:.2f} of what Lightning's defaults add)"
            for name in shown
            if name != "raw"
        )
        + f"; plain PyTorch ({chosen.model}) takes {shown['raw']['us_per_step_median']:.0f} us.",
    }
    print(record["says"])
    if chosen.out:
        write_record(record, chosen.out)


if __name__ == "__main__":
    main()
