"""Checks on a real GPU what only a real GPU can show, a promise a row, and leaves a record to send in.

    make bench-gpu

or ``python benchmarks/gpu.py --out benchmarks/records/<date>_gpu_<card>.json``. Each promise is looked at in a run of
the project's own commands, with the recommender's embedded data. On simulated cards it runs too, and says so.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from write_record import write_record

from wellfed.observe.hardware.detect import machine
from wellfed.observe.hardware.facts import GpuFacts
from wellfed.observe.hardware.torch_cuda import torch_cuda
from wellfed.record import git_state

ROOT = Path(__file__).parents[1]
SMALL = ("workload.data.scale=0.02", "workload.model.encoder_layers=1", "logger=none")
"""A run of seconds."""
TIMEOUT_S = 600


@dataclass(frozen=True)
class Row:
    """What became of one promise."""

    promise: str
    seen: str
    ok: bool | None
    """None: this machine can't show it."""
    raw: Any = None


@dataclass(frozen=True)
class Machine:
    """Where the promises are looked at."""

    gpus: tuple[GpuFacts, ...]
    folder: Path
    repeats: int
    small: bool
    """Fewer steps: for a test of this script."""

    def steps(self, num: int) -> str:
        """``trainer.max_steps``, fewer where it is small."""
        return f"trainer.max_steps={min(num, 12) if self.small else num}"


class NotRun(Exception):
    """A command ended otherwise than the promise needs; the message has its last words."""


def run(m: Machine, *overrides: str, code: int = 0) -> Mapping[str, Any]:
    """The record of a training with these overrides; its folder is in it as ``folder``.

    Raises:
        NotRun: it did not end with this exit code.
    """
    folder = m.folder / f"run_{len(list(m.folder.glob('run_*')))}"
    words = [*SMALL, *overrides, f"hydra.run.dir={folder}"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "src" / "train.py"), *words],
        cwd=m.folder,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode != code:
        raise NotRun(f"exit {done.returncode}: {' '.join((done.stderr or done.stdout).split())[-300:]}")
    return {**json.loads((folder / "run.json").read_text()), "folder": folder}


# ---- the promises ----


def the_card_is_known(m: Machine) -> Row:
    """NVML and torch speak of the same card."""
    torch_uuids = [device.uuid for device in torch_cuda().devices]
    seen = "; ".join(f"cuda:{gpu.index} {gpu.describe()}, NVML {gpu.nvml_index}, {gpu.uuid}" for gpu in m.gpus)
    known = all(gpu.nvml_index is not None for gpu in m.gpus) and len(torch_uuids) == len(m.gpus)
    return Row("NVML's card is the one that torch trains on", seen, known)


def a_run_is_watched(m: Machine) -> Row:
    """Utilisation, memory, power arrive while a run lasts."""
    record = run(m, "telemetry=dense", m.steps(600))
    figures = record["gpus"].get("0", {})
    wanted = ("util_pct", "mem_used_gib", "power_w")
    seen = ", ".join(
        f"{name} {figures[name]['mean']:.1f} (n={figures[name]['n']})" for name in wanted if name in figures
    )
    return Row("utilisation, memory and power are read while training", seen, all(name in figures for name in wanted))


def the_ceiling_is_the_rate_of_a_fed_run(m: Machine) -> Row:
    """Where the card is the bottleneck, nothing is promised."""
    busy = ("memory=dynamic", "loader=aggressive", m.steps(300))
    shares = []
    for _ in range(m.repeats):
        record = run(m, *busy)
        shares.append(record["throughput"]["samples_per_s"] / record["ceiling"]["samples_per_s"])
    return Row(
        "the ceiling is within 10 % of the rate of a run that the card limits",
        f"rate / ceiling {_spread(shares)}",
        abs(fmean(shares) - 1) <= 0.1,
        shares,
    )


def prefetch_hides_the_copy(m: Machine) -> Row:
    """Copies run beside the step: side by side, in turns."""
    exposed: dict[str, list[float]] = {"0": [], "2": []}
    for _ in range(m.repeats):
        for ahead, found in exposed.items():
            record = run(m, "loader=balanced", f"loader.device_prefetch={ahead}", m.steps(300))
            found.append(record["time"]["copy_frac"] or 0.0)
    seen = "; ".join(f"device_prefetch={ahead}: copy {_spread(found)} of a step" for ahead, found in exposed.items())
    return Row("device_prefetch hides the copy to the card", seen, fmean(exposed["2"]) <= fmean(exposed["0"]), exposed)


def memory_is_as_predicted(m: Machine) -> Row:
    """Predicted and reserved peaks, by precision and split."""
    found, lines = {}, []
    for name, words in {
        "fp32": ("gpu.precision=32-true",),
        "bf16": ("gpu.precision=bf16-mixed",),
        "fp32 split": ("gpu.precision=32-true", "memory.accumulate=4"),
        "dynamic": ("memory=dynamic",),
    }.items():
        memory = run(m, "gpu.memory_gib=4", *words, m.steps(60))["memory"]
        found[name] = (memory["predicted_peak_gib"], memory["measured_peak_gib"])
        lines.append(f"{name} {memory['predicted_peak_gib']:.3f} / {memory['measured_peak_gib']:.3f} GiB")
    off = [predicted / measured - 1 for predicted, measured in found.values()]
    return Row(
        "predicted peaks are within 8 % of what torch reserves, none below by more than 3 %",
        f"predicted / reserved: {'; '.join(lines)}",
        all(-0.03 <= each <= 0.08 for each in off),
        found,
    )


def out_of_memory_is_survived(m: Machine) -> Row:
    """A card that is full: the run goes on with smaller micro-batches, or ends with exit code 3 and says why."""
    words = ("memory=dynamic", "gpu.memory_gib=0.6", "gpu.enforce=true", m.steps(30))
    try:
        record = run(m, *words)
    except NotRun as ended:
        told = re.match(r"exit [23]:", str(ended)) is not None
        return Row("a budget that is too small is told, or survived", str(ended), told)
    kinds = [event["kind"] for event in record["events"] if event["kind"] in ("oom", "step_down")]
    return Row("a budget that is too small is told, or survived", f"ok, events {kinds}", True)


def compiled_runs_learn_the_same(m: Machine) -> Row:
    """Every mode of torch.compile, CUDA graphs among them, against the eager run."""
    losses = {}
    for mode in ("none", "default", "reduce-overhead", "max-autotune"):
        record = run(m, f"gpu.compile={mode}", "gpu.precision=32-true", "gpu.tf32=false", m.steps(60))
        failed = [event for event in record["events"] if event["kind"] == "compile_failed"]
        losses[mode] = None if failed else last_loss(record["folder"])
    compiled = [loss for mode, loss in losses.items() if mode != "none" and loss is not None]
    same = all(math.isclose(loss, losses["none"] or math.nan, rel_tol=1e-3) for loss in compiled)
    seen = ", ".join(f"{mode}: {'gave up' if loss is None else f'{loss:.6f}'}" for mode, loss in losses.items())
    return Row("torch.compile changes nothing that is learned", f"loss {seen}", same if compiled else None, losses)


def precisions_learn(m: Machine) -> Row:
    """16-mixed with its gradient scaler, bf16 in both ways."""
    found = {}
    for precision in ("32-true", "bf16-mixed", "16-mixed", "bf16-true"):
        record = run(m, f"gpu.precision={precision}", m.steps(120))
        found[precision] = last_loss(record["folder"])
    good = all(math.isclose(loss, found["32-true"], rel_tol=0.1) for loss in found.values())
    return Row(
        "every precision learns", ", ".join(f"{name}: loss {loss:.5f}" for name, loss in found.items()), good, found
    )


def runs_repeat(m: Machine) -> Row:
    """The same command, the same loss; resumed too, where kernels repeat themselves."""
    # The end of a cosine schedule would be another for the part.
    words = ("trainer.deterministic=true", "gpu.precision=32-true", "workload.schedule.name=constant")
    whole = run(m, *words, m.steps(40))
    part = run(m, *words, "trainer.max_steps=6", "trainer.checkpoint_every_steps=3")
    resumed = run(m, *words, m.steps(40), f"resume={part['folder'] / 'checkpoints' / 'last.ckpt'}")
    most = weight_difference(whole["folder"], resumed["folder"])
    return Row("a resumed run is the unbroken one, bit for bit", f"weights differ by at most {most:g}", most == 0, most)


def a_named_card_caps_a_larger_one(m: Machine) -> Row:
    """gpu=8gb on a larger card."""
    if (m.gpus[0].memory_gib or 0) < 12:
        return Row("gpu=8gb caps a larger card at 7.2 GiB", "the card is not larger", None)
    memory = run(m, "gpu=8gb", m.steps(30))["memory"]
    return Row(
        "gpu=8gb caps a larger card at 7.2 GiB",
        f"budget {memory['budget_gib']} GiB, reserved at most {memory['measured_peak_gib']:.2f}",
        memory["budget_gib"] == 7.2 and memory["measured_peak_gib"] <= 7.2,
    )


def ranks_learn_what_one_does(m: Machine) -> Row:
    """DDP over NCCL."""
    if len(m.gpus) < 2:
        return Row("two cards learn what one does (DDP)", "one card here", None)
    words = ("gpu.precision=32-true", "gpu.tf32=false", m.steps(40))
    losses = [last_loss(run(m, *words, *more)["folder"]) for more in ((), ("trainer=ddp",))]
    return Row("two cards learn what one does (DDP)", f"losses {losses}", math.isclose(*losses, rel_tol=1e-3), losses)


def the_tests_marked_gpu_pass(m: Machine) -> Row:
    """``pytest -m gpu``."""
    words = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    lines = done.stdout.strip().splitlines()
    return Row("the tests marked gpu pass", lines[-1] if lines else done.stderr[-300:], done.returncode == 0)


PROMISES: tuple[Callable[[Machine], Row], ...] = (
    the_card_is_known,
    a_run_is_watched,
    the_ceiling_is_the_rate_of_a_fed_run,
    prefetch_hides_the_copy,
    memory_is_as_predicted,
    out_of_memory_is_survived,
    a_named_card_caps_a_larger_one,
    compiled_runs_learn_the_same,
    precisions_learn,
    runs_repeat,
    ranks_learn_what_one_does,
    the_tests_marked_gpu_pass,
)


# ---- the table and the record ----


def last_loss(folder: Path) -> float:
    """The last training loss that a run wrote."""
    with (folder / "metrics.csv").open(encoding="utf-8", newline="") as stream:
        rows = [row for row in csv.DictReader(stream) if (row["split"], row["name"]) == ("train", "loss")]
    return float(rows[-1]["value"])


def weight_difference(one: Path, other: Path) -> float:
    """The largest difference between the last weights of two runs."""
    states = [
        torch.load(folder / "checkpoints" / "last.ckpt", map_location="cpu", weights_only=True)["state_dict"]
        for folder in (one, other)
    ]
    return max(float((states[0][name].double() - states[1][name].double()).abs().max()) for name in states[0])


def look(promise: Callable[[Machine], Row], m: Machine) -> Row:
    """One promise; a command that ends otherwise than it should is a promise that is not kept."""
    try:
        return promise(m)
    except (NotRun, subprocess.TimeoutExpired) as error:
        return Row((promise.__doc__ or promise.__name__).strip(), f"{error}", ok=False)


def _spread(values: list[float]) -> str:
    return f"{fmean(values):.3f}" + (f" (sd {stdev(values):.3f}, n={len(values)})" if len(values) > 1 else "")


def main() -> int:
    """Prints the table, writes the record; 1 if a promise was not kept."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = [promise.__name__ for promise in PROMISES]
    parser.add_argument("--only", nargs="+", choices=names, metavar="PROMISE", help=f"some of: {', '.join(names)}")
    parser.add_argument("--repeats", type=int, default=5, help="of what is measured (default 5)")
    parser.add_argument("--small", action="store_true", help="few steps: shows that the script runs, and no more")
    parser.add_argument("--out", type=Path, help="the record; default: benchmarks/records/<date>_gpu_<card>.json")
    chosen = parser.parse_args()
    facts = machine(torch_cuda())
    if not facts.training_gpus:
        print(f"No GPU that torch can use: {facts.torch_problem or facts.nvml_problem}. `make doctor` says more.")
        return 2
    rows: list[Row] = []
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        m = Machine(facts.training_gpus, Path(folder), chosen.repeats, chosen.small)
        for promise in PROMISES:
            if chosen.only is None or promise.__name__ in chosen.only:
                rows.append(look(promise, m))
                print(line(rows[-1]), flush=True)
    is_simulated = any(gpu.is_simulated for gpu in facts.gpus)
    kept, broken = (sum(row.ok is value for row in rows) for value in (True, False))
    says = f"{kept} of {len(rows)} promises seen kept on {facts.gpus[0].describe()}, {broken} broken."
    print(f"{says}{' Simulated: of no real GPU.' if is_simulated else ''}")
    out = (
        chosen.out
        or ROOT / "benchmarks" / "records" / f"{datetime.now(UTC).date()}_gpu_{_slug(facts.gpus[0].name)}.json"
    )
    record = {
        "theme": "gpu",
        "date": datetime.now(UTC).date().isoformat(),
        "command": " ".join(["python benchmarks/gpu.py", *sys.argv[1:]]),
        "simulated": is_simulated,
        "git": {key: value for key, value in (git_state(ROOT) or {}).items() if key != "diff"},
        "machine": {"load": os.getloadavg(), **facts.to_dict()},
        "config": {"repeats": chosen.repeats, "small": chosen.small, "overrides": SMALL},
        "results": [{"promise": row.promise, "seen": row.seen, "ok": row.ok} for row in rows],
        "raw": [asdict(row)["raw"] for row in rows],
        "seconds": time.monotonic() - began_s,
        "says": says,
    }
    write_record(record, out)
    print(f"The record, to send in with an issue: {out}")
    return int(broken > 0)


def line(row: Row) -> str:
    """A row of the table."""
    mark = {True: "ok  ", False: "NO  ", None: "--  "}[row.ok]
    return f"{mark} {row.promise}\n       {row.seen}"


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


if __name__ == "__main__":
    sys.exit(main())
