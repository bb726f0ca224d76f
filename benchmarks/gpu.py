"""Checks on a real GPU what only a real GPU can show, a promise a row, and leaves a record to send in.

    make bench-gpu

or ``python benchmarks/gpu.py --out benchmarks/records/<date>_gpu_<card>.json``. Each promise is looked at in runs of
the project's own commands: with the recommender's embedded data, every workload, and the models of
`planted_workload.py`, which keep a card busy for a known time. Runs whose times matter have the card to themselves.
The others share it, ``--jobs`` at a time. On simulated cards the script runs too, and says so.
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
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from measuring import finish
from planted_faults import INLINE, LARGE, ON_GPU, SHAPES, WHOLE

from wellfed.observe.hardware.detect import machine
from wellfed.observe.hardware.torch_cuda import torch_cuda
from wellfed.observe.machine_facts import GpuFacts

ROOT = Path(__file__).parents[1]
SMALL = ("workload.data.scale=0.02", "workload.model.encoder_layers=1", "logger=none")
"""A run of seconds."""
BUSY = ("workload=pictures", "logger=none", *ON_GPU)
"""Steps of 30 ms of matrix products."""
WORKLOADS = sorted(path.stem for path in (ROOT / "configs" / "workload").glob("*.yaml"))
LARGE_BATCHES = {"recsys": 65536, "restoration": 512, "hyperspectral": 2048, "forecast": 2048, "speech": 512}
"""Samples of a step whose peak is some hundred MiB, beside which constant workspaces are small."""
TIMEOUT_S = 600
_NUMBERS = count()


@dataclass(frozen=True)
class Row:
    """Result of one promise."""

    promise: str
    seen: str
    ok: bool | None
    """None: this machine can't show it."""


@dataclass(frozen=True)
class Machine:
    """Machine on which the promises are checked."""

    gpus: tuple[GpuFacts, ...]
    folder: Path
    repeats: int
    jobs: int
    small: bool
    """Fewer steps: for a test of this script."""

    def steps(self, num: int) -> str:
        """``trainer.max_steps``, fewer where it is small."""
        return f"trainer.max_steps={min(num, 12) if self.small else num}"


class NotRun(Exception):
    """A command ended otherwise than the promise needs; the message has its last words."""


def run(m: Machine, *overrides: str, base: Sequence[str] = SMALL) -> Mapping[str, Any]:
    """The record of a training with these overrides; its folder is in it as ``folder``.

    Raises:
        NotRun: it did not end with exit code 0.
    """
    folder = m.folder / f"run_{next(_NUMBERS)}"
    words = [*base, *overrides, f"hydra.run.dir={folder}"]
    if base is BUSY:
        words = ["--config-dir", str(m.folder / "configs"), *words]
    done = command(m, "src/train.py", *words)
    if done.returncode:
        raise NotRun(f"exit {done.returncode}: {' '.join((done.stderr or done.stdout).split())[-300:]}")
    return {**json.loads((folder / "run.json").read_text()), "folder": folder}


def command(m: Machine, script: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs a command of this repository to its end."""
    path = os.pathsep.join(filter(None, [str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]))
    return subprocess.run(
        [sys.executable, str(ROOT / script), *words],
        cwd=m.folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def run_all(
    m: Machine, wanted: Mapping[str, Sequence[str]], base: Sequence[str] = SMALL
) -> dict[str, Mapping[str, Any]]:
    """Several runs that share the card, by name."""
    with ThreadPoolExecutor(m.jobs) as pool:
        records = pool.map(lambda words: run(m, *words, base=base), wanted.values())
        return dict(zip(wanted, records, strict=True))


# ---- promises about times: one run after the other ----


def the_card_is_known(m: Machine) -> Row:
    """NVML and torch speak of the same card."""
    torch_uuids = [device.uuid for device in torch_cuda().devices]
    seen = "; ".join(f"cuda:{gpu.index} {gpu.describe()}, NVML {gpu.nvml_index}, {gpu.uuid}" for gpu in m.gpus)
    known = all(gpu.nvml_index is not None for gpu in m.gpus) and len(torch_uuids) == len(m.gpus)
    return Row("NVML's card is the one that torch trains on", seen, known)


def a_run_is_watched(m: Machine) -> Row:
    """Utilisation, memory, power, temperature and clocks arrive while a run lasts."""
    figures = run(m, *WHOLE, m.steps(200), base=BUSY)["gpus"].get("0", {})
    wanted = ("util_pct", "mem_used_gib", "power_w", "temp_c", "sm_clock_mhz")
    there = [name for name in wanted if name in figures]
    seen = ", ".join(f"{name} {figures[name]['mean']:.1f} (n={figures[name]['n']})" for name in there)
    return Row("utilisation, memory, power, temperature and clocks are read while training", seen, there == [*wanted])


def a_starved_card_is_idle(m: Machine) -> Row:
    """Loading takes 2.5 steps in the training process: the card has work for 40 % of the time, and NVML says so."""
    starved = run(m, "+workload.data.build_steps=2.5", *INLINE, m.steps(200), base=BUSY)
    fed = run(m, *WHOLE, m.steps(200), base=BUSY)
    found = []
    for record in (starved, fed):
        first = record["findings"][0]["id"] if record["findings"] else "none"
        util = record["gpus"]["0"]["util_pct"]["mean"]
        found.append((util, 1 - record["time"]["wait_frac"], first))
    seen = "; ".join(
        f"{name}: {util:.0f} % utilisation, waits {100 * (1 - work):.0f} % of a step, first finding {first}"
        for name, (util, work, first) in zip(("starved", "fed"), found, strict=True)
    )
    (low, _, first), (high, _, none) = found
    ok = low <= 60 and high >= 85 and first == "loading_in_main_process" and none == "healthy"
    return Row("a starved run shows an idle card and its cause, a fed one a busy card", seen, ok)


def the_ceiling_is_the_rate_of_a_fed_run(m: Machine) -> Row:
    """Where the card is the bottleneck, nothing is promised."""
    shares = []
    for _ in range(m.repeats):
        record = run(m, *WHOLE, m.steps(150), base=BUSY)
        shares.append(record["throughput"]["samples_per_s"] / record["ceiling"]["samples_per_s"])
    return Row(
        "the ceiling is within 10 % of the rate of a run that the card limits",
        f"rate / ceiling {_spread(shares)}",
        abs(fmean(shares) - 1) <= 0.1,
    )


def prefetch_hides_the_copy(m: Machine) -> Row:
    """Copies of 50 MB run beside the step: side by side, in turns."""
    plain = ("loader.device_prefetch=0", "loader.pin_memory=false")
    ways = {"pageable, in the step": plain, "pinned, 2 ahead": ("loader.device_prefetch=2", "loader.pin_memory=true")}
    exposed: dict[str, list[float]] = {name: [] for name in ways}
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(m.repeats):
        for name, words in ways.items():
            record = run(m, *WHOLE, *LARGE, *words, m.steps(80), base=BUSY)
            exposed[name].append(record["time"]["copy_frac"] or 0.0)
            rates[name].append(record["throughput"]["samples_per_s"])
    seen = "; ".join(f"{name}: copy {_spread(found)} of a step" for name, found in exposed.items())
    before, after = rates.values()
    seen += f"; samples/s x {_spread([new / old for old, new in zip(before, after, strict=True)])}"
    least, most = (fmean(found) for found in reversed(exposed.values()))
    return Row("device_prefetch hides the copy to the card", seen, least <= 0.1 * most)


def a_trace_shows_the_card(m: Machine) -> Row:
    """``debug=profiler``: kernels and copies are in it, and the share of time in which a kernel ran."""
    record = run(m, *WHOLE, *LARGE, "debug=profiler", m.steps(60), base=BUSY)
    profile = record["profile"] or {}
    busy = profile.get("device_busy_frac")
    seen = "no profile" if not profile else ", ".join(f"{k} {v:.3g}" for k, v in profile.items() if type(v) is float)
    return Row("a trace shows how busy the card is", seen, None if m.small else bool(busy and busy > 0.5))


# ---- promises about what is computed and reserved: runs share the card ----


def memory_is_as_predicted(m: Machine) -> Row:
    """Predicted and reserved peaks, by precision and split."""
    ways = {
        "fp32": ("gpu.precision=32-true",),
        "bf16": ("gpu.precision=bf16-mixed",),
        "fp32 split": ("gpu.precision=32-true", "memory.accumulate=4"),
        "dynamic": ("memory=dynamic",),
    }
    records = run_all(m, {name: ("gpu.memory_gib=4", *words, m.steps(60)) for name, words in ways.items()})
    return peaks("predicted peaks are within 8 % of what torch reserves, none below by more than 3 %", records)


def every_workload_trains_as_planned(m: Machine) -> Row:
    """All workloads with their defaults and with large steps: the plan, and the peak that it predicted."""
    quick = (m.steps(20), "trainer.limit_batches=4", "logger=none")
    ways = {name: (f"workload={name}", *quick) for name in WORKLOADS}
    for name, batch in LARGE_BATCHES.items():
        ways[f"{name} {batch:,}"] = (f"workload={name}", f"workload.effective_batch_size={batch}", *quick)
    records = run_all(m, ways, base=())
    return peaks("every workload trains as planned, peaks within 8 % and none below by more than 3 %", records)


def peaks(promise: str, records: Mapping[str, Mapping[str, Any]]) -> Row:
    """Predicted and reserved peaks of these runs."""
    found = {}
    for name, record in records.items():
        found[name] = (record["memory"]["predicted_peak_gib"], record["memory"]["measured_peak_gib"])
    off = [math.nan if predicted is None else predicted / reserved - 1 for predicted, reserved in found.values()]
    lines = [
        f"{name} {predicted or math.nan:.3f} / {reserved:.3f} GiB" for name, (predicted, reserved) in found.items()
    ]
    return Row(promise, f"predicted / reserved: {'; '.join(lines)}", all(-0.03 <= each <= 0.08 for each in off))


def a_small_budget_is_told(m: Machine) -> Row:
    """A budget that nothing fits in: the run goes on with smaller micro-batches, or ends with exit code 3 and why."""
    try:
        record = run(m, "memory=dynamic", "gpu.memory_gib=0.6", "gpu.enforce=true", m.steps(30))
    except NotRun as ended:
        told = re.match(r"exit [23]:", str(ended)) is not None
        return Row("a budget that is too small is told, or survived", str(ended), told)
    return Row("a budget that is too small is told, or survived", f"ok, events {kinds(record)}", True)


def out_of_memory_is_survived(m: Machine) -> Row:
    """From step 20 on the model needs 8 GiB more for a whole step, in a budget of 4: smaller micro-batches fit."""
    scratch = ("++workload.model.scratch_mib=8000", "gpu.memory_gib=4", "gpu.enforce=true", "memory.on_oom=retry")
    record = run(m, *WHOLE, *scratch, m.steps(40), base=BUSY)
    peak = record["memory"]["measured_peak_gib"]
    seen = f"{record['status']}, {record['steps']} steps, events {kinds(record)}, peak {peak:.2f} GiB"
    ok = record["status"] == "ok" and (m.small or any("oom" in kind or "step_down" in kind for kind in kinds(record)))
    return Row("a step that runs out of memory is done again in smaller micro-batches", seen, ok)


def kinds(record: Mapping[str, Any]) -> list[str]:
    """Returns the kinds of a run's events."""
    return [event["kind"] for event in record["events"]]


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


def compiled_runs_learn_the_same(m: Machine) -> Row:
    """Every mode of torch.compile, CUDA graphs among them, against the eager run."""
    modes = ("none", "default", "reduce-overhead", "max-autotune")
    exact = ("gpu.precision=32-true", "gpu.tf32=false", m.steps(60))
    losses = {}
    for mode, record in run_all(m, {mode: (f"gpu.compile={mode}", *exact) for mode in modes}).items():
        losses[mode] = None if "compile_failed" in kinds(record) else last_loss(record["folder"])
    compiled = [loss for mode, loss in losses.items() if mode != "none" and loss is not None]
    same = all(math.isclose(loss, losses["none"] or math.nan, rel_tol=1e-3) for loss in compiled)
    seen = ", ".join(f"{mode}: {'gave up' if loss is None else f'{loss:.6f}'}" for mode, loss in losses.items())
    return Row("torch.compile changes nothing that is learned", f"loss {seen}", same if compiled else None)


def precisions_learn(m: Machine) -> Row:
    """16-mixed with its gradient scaler, bf16 in both ways."""
    ways = ("32-true", "bf16-mixed", "16-mixed", "bf16-true")
    records = run_all(m, {way: (f"gpu.precision={way}", m.steps(120)) for way in ways})
    found = {way: last_loss(record["folder"]) for way, record in records.items()}
    good = all(math.isclose(loss, found["32-true"], rel_tol=0.1) for loss in found.values())
    return Row("every precision learns", ", ".join(f"{name}: loss {loss:.5f}" for name, loss in found.items()), good)


def loaders_learn_the_same(m: Machine) -> Row:
    """The same seed with three ways to load: weights are equal to the last bit, where kernels repeat themselves."""
    exact = ("trainer.deterministic=true", "gpu.precision=32-true", m.steps(40))
    names = ("baseline", "balanced", "aggressive")
    records = run_all(m, {name: (f"loader={name}", *exact) for name in names})
    first = records["baseline"]["folder"]
    found = {name: weight_difference(first, records[name]["folder"]) for name in names[1:]}
    seen = ", ".join(f"{name}: weights differ by at most {most:g}" for name, most in found.items())
    return Row("no loader changes what is learned", seen, not any(found.values()))


def runs_repeat(m: Machine) -> Row:
    """The same command, the same loss; resumed too, where kernels repeat themselves."""
    # The end of a cosine schedule would be another for the part.
    words = ("trainer.deterministic=true", "gpu.precision=32-true", "workload.schedule.name=constant")
    whole = run(m, *words, m.steps(40))
    part = run(m, *words, "trainer.max_steps=6", "trainer.checkpoint_every_steps=3")
    resumed = run(m, *words, m.steps(40), f"resume={part['folder'] / 'checkpoints' / 'last.ckpt'}")
    most = weight_difference(whole["folder"], resumed["folder"])
    return Row("a resumed run is the unbroken one, bit for bit", f"weights differ by at most {most:g}", most == 0)


def ranks_learn_what_one_does(m: Machine) -> Row:
    """DDP over NCCL."""
    if len(m.gpus) < 2:
        return Row("two cards learn what one does (DDP)", "one card here", None)
    words = ("gpu.precision=32-true", "gpu.tf32=false", m.steps(40))
    losses = [last_loss(run(m, *words, *more)["folder"]) for more in ((), ("trainer=ddp",))]
    return Row("two cards learn what one does (DDP)", f"losses {losses}", math.isclose(*losses, rel_tol=1e-3))


def the_tests_marked_gpu_pass(m: Machine) -> Row:
    """``pytest -m gpu``."""
    words = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    lines = done.stdout.strip().splitlines()
    return Row("the tests marked gpu pass", lines[-1] if lines else done.stderr[-300:], done.returncode == 0)


PROMISES: tuple[Callable[[Machine], Row], ...] = (
    the_card_is_known,
    a_run_is_watched,
    a_starved_card_is_idle,
    the_ceiling_is_the_rate_of_a_fed_run,
    prefetch_hides_the_copy,
    a_trace_shows_the_card,
    memory_is_as_predicted,
    every_workload_trains_as_planned,
    a_small_budget_is_told,
    out_of_memory_is_survived,
    a_named_card_caps_a_larger_one,
    compiled_runs_learn_the_same,
    precisions_learn,
    loaders_learn_the_same,
    runs_repeat,
    ranks_learn_what_one_does,
    the_tests_marked_gpu_pass,
)


# ---- the table and the record ----


def last_loss(folder: Path) -> float:
    """Returns the last training loss that a run wrote."""
    with (folder / "metrics.csv").open(encoding="utf-8", newline="") as stream:
        rows = [row for row in csv.DictReader(stream) if (row["split"], row["name"]) == ("train", "loss")]
    return float(rows[-1]["value"])


def weight_difference(one: Path, other: Path) -> float:
    """Returns the largest difference between the last weights of two runs."""
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
    except (KeyError, IndexError, TypeError) as error:
        seen = f"a record without what is looked for: {type(error).__name__}: {error}"
        return Row((promise.__doc__ or promise.__name__).strip(), seen, ok=False)


def _spread(values: list[float]) -> str:
    return f"{fmean(values):.3f}" + (f" (sd {stdev(values):.3f}, n={len(values)})" if len(values) > 1 else "")


def main() -> int:
    """Prints the table, writes the record; 1 if a promise was not kept."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = [promise.__name__ for promise in PROMISES]
    parser.add_argument("--only", nargs="+", choices=names, metavar="PROMISE", help=f"some of: {', '.join(names)}")
    parser.add_argument("--repeats", type=int, default=5, help="of what is measured (default 5)")
    parser.add_argument("--jobs", type=int, default=4, help="runs that share the card, where times don't matter")
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
        m = Machine(facts.training_gpus, Path(folder), chosen.repeats, chosen.jobs, chosen.small)
        configs = m.folder / "configs" / "workload"
        configs.mkdir(parents=True)
        for shape in SHAPES:
            (configs / f"{shape.name}.yaml").write_text(shape.yaml)
        for promise in PROMISES:
            if chosen.only is None or promise.__name__ in chosen.only:
                rows.append(look(promise, m))
                print(line(rows[-1]), flush=True)
    is_simulated = any(gpu.is_simulated for gpu in facts.gpus)
    kept, broken = (sum(row.ok is value for row in rows) for value in (True, False))
    says = f"{kept} of {len(rows)} promises seen kept on {facts.gpus[0].describe()}, {broken} broken."
    says += " Simulated: of no real GPU." if is_simulated else ""
    out = (
        chosen.out
        or ROOT / "benchmarks" / "records" / f"{datetime.now(UTC).date()}_gpu_{_slug(facts.gpus[0].name)}.json"
    )
    finish(
        "gpu",
        [{"promise": row.promise, "seen": row.seen, "ok": row.ok} for row in rows],
        says,
        out,
        config={"repeats": chosen.repeats, "small": chosen.small, "overrides": SMALL},
        simulated=is_simulated,
        machine={"load": os.getloadavg(), **asdict(facts)},
        seconds=time.monotonic() - began_s,
    )
    print(f"The record, to send in with an issue: {out}")
    return int(broken > 0)


def line(row: Row) -> str:
    """Returns a row of the table."""
    mark = {True: "ok  ", False: "NO  ", None: "--  "}[row.ok]
    return f"{mark} {row.promise}\n       {row.seen}"


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


if __name__ == "__main__":
    sys.exit(main())
