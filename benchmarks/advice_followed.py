"""Plants faults, does what the pages of their findings advise, and measures both in turns.

    python benchmarks/advice_followed.py [--only slow_callbacks] [--rounds 3] [--minutes 20] [--out RECORD] [--add]
    python benchmarks/advice_followed.py --recorded --out RECORD
    python benchmarks/advice_followed.py --pages

Faults are those of `planted_faults.py` and `planted_rank_faults.py`, one for each finding whose cause can be removed
here. An override is taken from the finding itself. Where a finding prints none, its cause is removed, as its page
advises: the callback does its work less often, the thread becomes a process. ``--add`` keeps the rows of the record
that are not measured again. ``--recorded`` adds pairs of recorded runs, `RECORDED`, for findings without a row.
``--pages`` writes the example before and after into each page of docs/findings from the newest record;
tests/every/test_docs.py compares them. Remarks on the machine (`busy_machine`) are left out of what is
found, and the cores that other programs took are in the record.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import math
import re
import socket
import statistics
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src"), str(ROOT / "benchmarks")]

from planted_faults import FAULTS, SHAPES, Fault  # noqa: E402
from planted_rank_faults import FAULTS as RANK_FAULTS  # noqa: E402
from planted_rank_faults import RankFault, RankMachine  # noqa: E402
from planted_runs import Machine, rate_of  # noqa: E402

from benchmarks.measuring import finish  # noqa: E402
from wellfed.explain.diagnosis.evidence import Evidence  # noqa: E402
from wellfed.explain.diagnosis.finding import Finding  # noqa: E402
from wellfed.explain.diagnosis.run_rules import run_rules  # noqa: E402
from wellfed.explain.diagnosis.thresholds import OTHERS_FRAC  # noqa: E402

PAGES = ROOT / "docs" / "findings"
RECORDS = ROOT / "benchmarks" / "records"
TRACES = ROOT / "tests" / "traces"
THEME = "advice_followed"
PRINTED = ("unexplained", "wide_batches", "slow_machine", "copy_straggler")
"""Findings whose pages show the text of these runs; the other texts are of tests/traces."""
ON_MACHINE = ("busy_machine", "machine_was_slower")
RANKS, SLOW_RANK = 2, 1


def _memory_gib(evidence: Evidence) -> float | None:
    """Returns the highest memory in use on a GPU, or the highest peak of a rank."""
    peaks = [one["peak_gib"] for one in evidence.record.ranks if one["peak_gib"] is not None]
    peaks += [one["mem_used_gib"]["max"] for one in evidence.record.gpus.values() if "mem_used_gib" in one]
    return max(peaks, default=None)


def _last_loss(evidence: Evidence) -> float | None:
    values = evidence.losses[1]
    return float(values[-1]) if len(values) else None


def _rate(evidence: Evidence) -> float | None:
    """Returns the rate of all ranks; of one process, validations, checkpoints and pauses count too."""
    if evidence.record.ranks and evidence.record.throughput:
        return evidence.record.throughput["samples_per_s"]
    return rate_of(evidence)


FIGURES: Mapping[str, tuple[str, Callable[[Evidence], float | None]]] = {
    "rate": ("samples/s", _rate),
    "memory": ("GiB", _memory_gib),
    "batch": ("MiB", lambda evidence: sum((evidence.record.loading.get("batch_dtypes") or {}).values()) or None),
    "steps done": ("steps", lambda evidence: float(evidence.record.steps)),
    "last loss": ("", _last_loss),
}
"""Unit and value of what a page compares, by its name."""


@dataclass(frozen=True)
class Case:
    """A planted fault, and what its finding advises."""

    finding: str
    planted: Fault | RankFault
    advice: str = ""
    """What is done, in words; empty = the override that the finding prints."""
    mended: Fault | RankFault | None = None
    """The run without the cause; None = with the override."""
    figure: str = "rate"
    shape: str = "table"


_PLANTED = {fault.kind: fault for fault in FAULTS}
_RANKS = {(fault.kind, fault.where, fault.strategy): fault for fault in RANK_FAULTS}


def _typed(finding: str, kind: str | Fault, **more: Any) -> Case:
    return Case(finding, _PLANTED[kind] if isinstance(kind, str) else kind, **more)


def _without(finding: str, kind: str | Fault, advice: str, *instead: str, **more: Any) -> Case:
    """Returns a case whose code is mended: ``instead`` replaces the overrides that plant the fault."""
    planted = _PLANTED[kind] if isinstance(kind, str) else kind
    return Case(finding, planted, advice, replace(planted, fault=instead), **more)


def _rank(
    finding: str, kind: str, advice: str = "", figure: str = "rate", is_fsdp: bool = False, **mended: Any
) -> Case:
    """Returns a case of ranks on the CPU, or with FSDP on simulated cards: DDP hides their slow copies and clocks."""
    planted = _RANKS[kind, *(("simulated", "fsdp") if is_fsdp else ("cpu", "ddp"))]
    return Case(finding, planted, advice, replace(planted, **mended) if advice else None, figure)


_WHOLE = "+workload.data.has_fetch=true"
_SHORT = Fault("few_steps", "too_few_steps", "cpu", (_WHOLE,), ("trainer.max_steps=12",))
_SHORT_EPOCHS = Fault(
    "short_epochs",
    "unexplained",
    "cpu",
    (
        *("+workload.data.build_steps=2", "+workload.data.eval_batches=0", "loader.persistent_workers=true"),
        *("loader.backend=processes", "loader.num_workers=3", "trainer.checkpoint_every_steps=1000"),
    ),
    ("+workload.data.num_batches=8",),
    steps=120,
)
_DATA = "+workload.data"
_WIDE = replace(_PLANTED["float64_collate"], code=(_WHOLE, f"{_DATA}.num_batches=40"), fault=(f"{_DATA}.wide=true",))
_LOCK = replace(
    _PLANTED["lock_in_the_dataset"],
    code=(f"{_DATA}.build_steps=2.5", "loader.backend=processes", "loader.num_workers=3"),
    fault=(f"{_DATA}.how=lock",),
)
_COLUMNS = replace(
    _PLANTED["slow_handover"],
    code=(f"{_DATA}.columns=1500", f"{_DATA}.build_steps=0.5", "loader.backend=processes", "loader.num_workers=2"),
    fault=(),
)
_JOINED = "++workload.model.joined=true"
CASES = (
    _typed("too_few_workers", "too_few_workers"),
    _typed("slow_storage", "slow_storage"),
    _typed("uneven_batches", "uneven_batches"),
    _typed("workers_take_the_cpu", "workers_take_the_cpu"),
    _typed("slow_samples", "slow_samples"),
    _without("slow_handover", _COLUMNS, "one tensor instead of 1,500", f"{_DATA}.stacked=true"),
    _without("contended_loading", _LOCK, "no lock"),
    _typed("frequent_checkpoints", "frequent_checkpoints"),
    _typed("frequent_validation", "frequent_validation"),
    _without("slow_callbacks", "average_on_the_host", "in one step of 20",
             "+callbacks.mean={_target_: planted_workload.HostAverage, values: 500000, every: 20}"),
    _without("busy_thread", "background_thread", "in a process of its own", "++workload.model.burns=true",
             "++workload.model.apart=true"),
    _without("step_time_trend", "growing_loss", "nothing grows"),
    _without("few_threads", "one_thread", "two threads", "++workload.model.threads=2"),
    _without("many_tensors", "many_small_tensors", "one tensor", "++workload.model.tiny=3000", _JOINED),
    _without("wide_batches", _WIDE, "float32", shape="pictures", figure="batch"),
    _without("too_few_steps", _SHORT, "`trainer.max_steps=100`", "trainer.max_steps=100", figure="steps done"),
    _without("unexplained", _SHORT_EPOCHS, "epochs of 80 steps", f"{_DATA}.num_batches=80"),
    _typed("slow_copy", "slow_copy"),
    _typed("tensor_cores_idle", "tensor_cores_idle"),
    _without("launch_bound", "launch_bound", "40 small operations fewer"),
    _without("synchronisation", "synchronisation", "no `.item()`"),
    _without("memory_bound", "memory_bound", "the operations joined into one", "++workload.model.moves=true", _JOINED),
    Case("clocks_limited", _PLANTED["clocks_limited"], "a card that stays cool",
         replace(_PLANTED["clocks_limited"], card={})),
    _typed("device_memory_full", "device_memory_full", figure="steps done"),
    _without("memory_creeps", "memory_creeps", "nothing is kept", figure="memory"),
    _without("utilisation_swings", "pauses_of_its_own", "no pauses"),
    _rank("input_straggler", "input_inline"),
    _rank("compute_straggler", "slow_forward", "the same work on all ranks", model={}),
    _rank("uneven_shares", "long_sequences", "sequences of one length", data={}),
    _rank("host_straggler", "callback_on_one_rank", "no callback", pause_ms=0.0),
    _rank("slow_machine", "cpu_taken", "the other programs ended", burners=0),
    _rank("slow_link", "slow_link"),
    _rank("uneven_memory", "memory_of_one_rank", "nothing is kept", figure="memory", model={}),
    _rank("copy_straggler", "slow_copy", is_fsdp=True),
    _rank("slow_gpu", "hot_card", "a card that stays cool", is_fsdp=True, variables={}),
)  # fmt: skip


_WHOLE_BATCHES, _ON_CARD = "cpu/whole_batches_table", "simulated/on_card_table"
RECORDED = {
    "slow_callbacks": ("cpu/average_on_the_host_table", _WHOLE_BATCHES, "without the callback", "rate"),
    "busy_thread": ("cpu/background_thread_table", _WHOLE_BATCHES, "without the thread", "rate"),
    "step_time_trend": ("cpu/growing_loss_table", _WHOLE_BATCHES, "nothing grows", "rate"),
    "loss_blows_up": ("cpu/loss_blows_up_table", _WHOLE_BATCHES, "without the outliers", "last loss"),
    "clocks_limited": ("simulated/clocks_limited_table", _ON_CARD, "a card that stays cool", "rate"),
    "memory_creeps": ("simulated/memory_creeps_table", _ON_CARD, "nothing is kept", "memory"),
    "utilisation_swings": ("simulated/pauses_of_its_own_table", _ON_CARD, "no pauses", "rate"),
    "input_straggler": ("cpu/ranks_starved", "cpu/ranks_healthy", "the data of all ranks as fast", "rate"),
}
"""Recorded runs with a fault and without it (tests/traces), what was done, and the figure. They stand in for runs in
turns where other programs hide the finding."""


class Both:
    """Runs of one process and of several ranks; a context manager."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._stack = folder, contextlib.ExitStack()
        self._machine: Machine | None = None
        self._ranks: RankMachine | None = None

    def __enter__(self) -> Both:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def run(self, case: Case, planted: Fault | RankFault, more: Sequence[str] = ()) -> Evidence:
        """Trains, and returns what the run has left."""
        if isinstance(planted, RankFault):
            self._ranks = self._ranks or self._stack.enter_context(RankMachine(self._made("ranks")))
            fault = replace(planted, overrides=(*planted.overrides, *more))
            folder, printed = self._ranks.run(fault, RANKS, SLOW_RANK)
        else:
            self._machine = self._machine or self._stack.enter_context(Machine(self._made("runs")))
            shape = next(one for one in SHAPES if one.name == case.shape)
            run = self._machine.run(shape, planted, [*planted.code, *planted.fault, *more])
            folder, printed = run.folder, run.printed
        if folder is None:
            raise RuntimeError(f"{case.finding}: {printed[-2000:]}")
        return Evidence.read(folder)

    def _made(self, name: str) -> Path:
        place = self._folder / name
        place.mkdir()
        return place


def follow(both: Both, case: Case, rounds: int) -> dict[str, Any] | None:
    """Returns what the advice of a finding has changed; None, with a message, without the finding or any advice."""
    befores: list[Evidence] = []
    afters: list[Evidence] = []
    typed: tuple[str, ...] = ()
    said: Finding | None = None
    for _ in range(rounds):
        before = both.run(case, case.planted)
        found = [one for one in run_rules(before) if one.id == case.finding]
        if said is None:
            if not found:
                print(f"{case.finding}: not found, but {[one.id for one in run_rules(before)]}", flush=True)
                return None
            said, typed = found[0], found[0].change
            if case.finding == "slow_samples":
                listed = re.search(r"in more than one epoch: ([\d, ]+)", said.text)
                typed = (f"loader.skip_ids=[{listed[1].replace(' ', '')}]",) if listed else ()
            elif case.advice:
                typed = ()
            if not typed and not case.advice:
                print(f"{case.finding}: no override is printed", flush=True)
                return None
        befores.append(before)
        afters.append(both.run(case, case.mended or case.planted, typed))
    typed_text = f"`{' '.join(typed)}`" if typed else case.advice
    facts = {"finding": case.finding, "fault": case.planted.kind, "where": case.planted.where, "advice": typed_text}
    return row_of(facts, case.figure, befores, afters, said)


def row_of(
    facts: Mapping[str, Any], figure: str, befores: Sequence[Evidence], afters: Sequence[Evidence], said: Finding | None
) -> dict[str, Any] | None:
    """Returns a row of the record; None, with a message, if a run lacks the figure."""
    unit, value = FIGURES[figure]
    pairs = [(value(before), value(after)) for before, after in zip(befores, afters, strict=True)]
    if any(each is None for pair in pairs for each in pair):
        print(f"{facts['finding']}: no figure in {pairs}", flush=True)
        return None
    cores = [one.telemetry.mean_others_cores or 0.0 for one in (*befores, *afters)]
    cores = [each for each in cores if math.isfinite(each)] or [0.0]  # unknown beside some ranks
    row = {
        **facts,
        "ranks": max(1, len(befores[0].record.ranks)),
        "n": len(pairs),
        "figure": figure,
        "unit": unit,
        "before": _median([before for before, _ in pairs]),
        "after": _median([after for _, after in pairs]),
        "found_before": found_in(befores),
        "found_after": found_in(afters),
        "others_cores": statistics.median(cores),
        "says": _printed(said),
    }
    if figure == "rate":
        gains = sorted(after / before for before, after in pairs)
        row["gain"] = [statistics.median(gains), gains[0], gains[-1]]
    return row


def of_traces(finding: str) -> dict[str, Any] | None:
    """Returns the row of two recorded runs."""
    before, after, advice, figure = RECORDED[finding]
    with tempfile.TemporaryDirectory() as scratch:
        runs = [_unpacked(name, Path(scratch) / str(place)) for place, name in enumerate((before, after))]
    facts = {"finding": finding, "traces": [before, after], "where": before.partition("/")[0], "advice": advice}
    said = next(one for one in run_rules(runs[0]) if one.id == finding)
    return row_of(facts, figure, runs[:1], runs[1:], said)


def _unpacked(name: str, folder: Path) -> Evidence:
    folder.mkdir()
    trace = json.loads(gzip.decompress((TRACES / f"{name}.json.gz").read_bytes()))
    for file, text in trace["files"].items():
        (folder / file).write_text(text, encoding="utf-8")
    return Evidence.read(folder)


def _printed(said: Finding | None) -> str:
    """Returns the line of a finding, without names of this machine."""
    line = f"- {said.id} ({said.severity}): {said.text}" if said else ""
    return line.replace(socket.gethostname(), "node-a").replace(f"{ROOT}/", "")


def _median(values: Sequence[float]) -> float | str:
    """Returns the median; text if it is not finite, which JSON does not have."""
    middle = statistics.median(values)
    return middle if math.isfinite(middle) else str(middle)


def found_in(runs: Sequence[Evidence]) -> list[str]:
    """Returns the findings that most runs have, without remarks on the machine."""
    ids = [tuple(one.id for one in run_rules(run) if one.id not in ON_MACHINE) for run in runs]
    return list(statistics.mode(ids))


def example(row: Mapping[str, Any], record: str) -> str:
    """Returns the part of a page that shows a run before and after."""
    card = "simulated cards with FSDP" if row["ranks"] > 1 else "a simulated card"
    where = "two CPU cores" if row["where"] == "cpu" else f"{card}, not as fast as real ones"
    ranks = f"{row['ranks']} ranks on " if row["ranks"] > 1 else ""
    how = f"medians of {row['n']} runs each, in turns" if row["n"] > 1 else "one run each"
    how = "one recorded run each" if "traces" in row else how
    busy = ", beside other programs" if row["others_cores"] >= 2 * OTHERS_FRAC else ""  # of two cores
    lines = [
        f"Before and after, {ranks}{where}, {how}{busy}",
        f"([record](../../benchmarks/records/{record})):",
        "",
        f"| | {row['figure']} | found |",
        "|---|---|---|",
    ]
    for name, when in (("before", "before"), (row["advice"], "after")):
        found = ", ".join(f"`{each}`" for each in row[f"found_{when}"]) or "nothing"
        lines.append(f"| {name} | {_shown(row[when], row['unit'])} | {found} |")
    return "\n".join(lines)


def printed(row: Mapping[str, Any]) -> str:
    """Returns the part of a page that shows the text of a finding."""
    where = "on two CPU cores" if row["ranks"] == 1 else "on two ranks"
    of_card = ", on simulated cards, not as fast as real ones" if row["where"] == "simulated" else ""
    return f"A fault planted in a real run {where}{of_card}:\n```text\n{textwrap.fill(row['says'], 118)}\n```"


def _shown(value: float | str, unit: str) -> str:
    if isinstance(value, str):
        return value
    text = f"{value:,.0f}" if value >= 100 or unit == "steps" else f"{value:.3g}"
    return f"{text} {unit}".strip()


def newest() -> Path:
    """Returns the newest record."""
    return sorted(RECORDS.glob(f"*_{THEME}_cpu.json"))[-1]


_EXAMPLE = rf"\n\nBefore and after, [^\n]*\n\(\[record\]\(\S*_{THEME}_\S*\)\):\n\n(?:\|[^\n]*\n)*\|[^\n]*"
"""What `example` has written into a page."""
_TEXT = r"## Example\n\n.*?```text\n.*?```"
"""The text of a finding on its page."""


def write_pages() -> None:
    """Writes the examples of the newest record into the pages."""
    record = newest()
    for row in json.loads(record.read_text(encoding="utf-8"))["results"]:
        path = PAGES / f"{row['finding']}.md"
        text = path.read_text(encoding="utf-8")
        text = re.sub(_EXAMPLE, "", text)
        if row["finding"] in PRINTED:
            text = re.sub(_TEXT, lambda _, row=row: f"## Example\n\n{printed(row)}", text, flags=re.DOTALL)
        shown = f"\n\n{example(row, record.name)}\n\n## See also"
        path.write_text(text.replace("\n\n## See also", shown), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[], choices=[case.finding for case in CASES])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=30.0, help="no case is begun after that")
    parser.add_argument("--pages", action="store_true", help="write the pages from the newest record")
    parser.add_argument("--out", type=Path, help="the record")
    parser.add_argument(
        "--recorded", action="store_true", help="add recorded runs for findings without a row, run nothing"
    )
    parser.add_argument("--add", action="store_true", help="keep rows of the record that are not measured again")
    chosen = parser.parse_args()
    if chosen.pages:
        write_pages()
        return
    if (chosen.add or chosen.recorded) and chosen.out is None:
        parser.error("--add and --recorded need --out")
    kept = json.loads(chosen.out.read_text(encoding="utf-8"))["results"] if chosen.add or chosen.recorded else []
    rows = {row["finding"]: row for row in kept}
    if chosen.recorded:
        for finding in RECORDED:
            if finding not in rows and (row := of_traces(finding)) is not None:
                rows[finding] = row
        _write(rows, chosen.out)
        return
    until_s = time.monotonic() + 60 * chosen.minutes
    temporary = tempfile.TemporaryDirectory(prefix="advice-", ignore_cleanup_errors=True)
    with temporary as folder, Both(Path(folder)) as both:
        for case in CASES:
            if (chosen.only and case.finding not in chosen.only) or time.monotonic() > until_s:
                continue
            try:
                row = follow(both, case, chosen.rounds)
            except (RuntimeError, OSError) as error:
                print(f"{case.finding}: {error}", flush=True)
                continue
            if row is not None:
                rows[case.finding] = row
                print(example(row, "RECORD"), row["says"], f"others took {row['others_cores']:.2f} cores", sep="\n")
                _write(rows, chosen.out)


def _write(rows: Mapping[str, Mapping[str, Any]], out: Path | None) -> None:
    better = [row for row in rows.values() if row["figure"] == "rate" and row["gain"][0] > 1]
    rates = [row for row in rows.values() if row["figure"] == "rate"]
    simulated, recorded = sum(row["where"] == "simulated" for row in rates), sum("traces" in row for row in rates)
    says = (
        f"With the printed override, or without the cause, {len(better)} of {len(rates)} planted runs were faster. "
        f"{simulated} of them were on simulated cards, not as fast as real ones, {recorded} are older recorded runs. "
        f"n is at least {min((row['n'] for row in rates), default=0)}."
    )
    finish("advice of findings, followed", [*rows.values()], says, out, config={"slow_rank": SLOW_RANK})


if __name__ == "__main__":
    main()
