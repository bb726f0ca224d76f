"""Faults planted in real runs: is the true cause the first finding, and does the printed override win the time back?

    python benchmarks/diagnosis.py [--only too_few_workers] [--shapes table] [--where cpu] [--out RECORD]
    python benchmarks/diagnosis.py --traces tests/traces --out benchmarks/records/<date>_diagnosis_cpu.json
    python benchmarks/diagnosis.py --only slow_copy --out RECORD --again
    python benchmarks/diagnosis.py --judge tests/traces

Each fault of `planted_faults.py` is planted in a run of `src/train.py` of each workload shape, on the CPU or on the
simulated card (tests/fake_cuda, tests/fake_nvml). The first finding of its run.json is compared with the cause; what
it says to change is typed behind the same command, and the rate measured again. A third run has what a person would
have set: healthy. Its rate says what there was to win. Rates are those of the whole training, validations and
checkpoints in its midst included.

    won back = (changed - planted) / (healthy - planted)

One run at a time. ``--no-after`` leaves out the second and the third: the first finding alone is compared, in about 30
minutes on two cores that do nothing else; with them it takes an hour. ``--judge`` runs nothing: it judges the tables
that ``--traces`` has kept.

Where other programs take a quarter of the cores and more, unless the fault brings them, there is no verdict: such runs
are counted as busy, and are neither right nor wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src"), str(ROOT / "benchmarks")]

from planted_faults import FAULTS, HEALTHY, SHAPES, UNTUNED, Fault, Healthy, Shape  # noqa: E402
from planted_runs import CARD, Machine, Run, save_trace  # noqa: E402

from benchmarks.measuring import finish  # noqa: E402
from wellfed.explain.diagnosis.evidence import Evidence  # noqa: E402
from wellfed.explain.diagnosis.run_rules import run_rules  # noqa: E402
from wellfed.explain.diagnosis.thresholds import OTHERS_FRAC  # noqa: E402


@dataclass
class Verdict:
    """Verdict on a run with a planted fault."""

    kind: str
    shape: str
    where: str
    cause: str
    first: str
    others: list[str]
    is_right: bool
    said: str
    change: list[str]
    planted_per_s: float | None
    judged_ms: float
    changed_per_s: float | None = None
    healthy_per_s: float | None = None
    won_back_frac: float | None = None
    gain_predicted: float | None = None
    gain_measured: float | None = None
    has_cure: bool = False
    others_cores: float = 0.0
    is_busy: bool = False
    """Other programs took so much of the machine that there is no verdict."""

    @property
    def gain_error_frac(self) -> float | None:
        """Returns the error of the predicted gain."""
        if self.gain_predicted is None or self.gain_measured is None:
            return None
        return abs(self.gain_predicted / self.gain_measured - 1)


def is_right(planted: Run, fault: Fault) -> bool:
    """The cause comes first, or behind the busy machine; a note stands beside none that costs time."""
    found = [each for each in planted.findings if each["id"] != "busy_machine" or fault.burners]
    first = found[0]["id"] if found else planted.first
    if not fault.is_note:
        return first in (fault.cause, *fault.also)
    causes = [each["id"] for each in found if each["severity"] != "info"]
    return not causes and fault.cause in (each["id"] for each in found)


def others_cores(run: Run) -> float:
    """Cores that other programs kept at work while the run trained."""
    return 0.0 if run.evidence is None else run.evidence.telemetry.mean_others_cores or 0.0


def has_company(run: Run) -> bool:
    """Returns whether other programs were too busy for a verdict."""
    cores = os.cpu_count() if run.evidence is None else run.evidence.cores
    return others_cores(run) >= OTHERS_FRAC * (cores or 1.0)


def judge_fault(machine_: Machine, fault: Fault, shape: Shape, *, has_after: bool, traces: Path | None) -> Verdict:
    """Plants it, and then does what the first finding says. What was judged right may become a trace."""
    planted = machine_.run(shape, fault, [*fault.code, *fault.fault])
    if planted.code == 2:
        raise RuntimeError(f"{planted.command}: {planted.printed}")
    first = planted.findings[0] if planted.findings else None
    verdict = Verdict(
        fault.kind,
        shape.name,
        fault.where,
        fault.cause,
        planted.first,
        [each["id"] for each in planted.findings[1:]],
        is_right(planted, fault),
        first["text"] if first else planted.printed[-400:],
        first["change"] if first else [],
        planted.rate,
        planted.judged_ms,
        has_cure=fault.cure is not None,
        others_cores=others_cores(planted),
        is_busy=has_company(planted) and not fault.burners,
    )
    if traces is not None and verdict.is_right:
        save_trace(planted, fault, traces / fault.where / f"{fault.kind}_{shape.name}.json.gz")
    if not has_after or planted.rate is None:
        return verdict
    if first and first["change"] and not first["changes_learning"]:
        changed = machine_.run(shape, fault, [*fault.code, *fault.fault, *first["change"]])
        verdict.changed_per_s = changed.rate
        if changed.rate is not None:
            verdict.gain_measured = changed.rate / planted.rate
            verdict.gain_predicted = first["gain"]["factor"] if first["gain"] else None
        else:
            verdict.said += f" CHANGED RUN FAILED: {changed.printed[-300:]}"
    if fault.cure is not None:
        healthy = machine_.run(shape, fault, [*fault.code, *fault.cure])
        verdict.healthy_per_s = healthy.rate
        if healthy.rate is not None and verdict.changed_per_s is not None and healthy.rate > planted.rate:
            won = verdict.changed_per_s - planted.rate
            verdict.won_back_frac = won / (healthy.rate - planted.rate)
    return verdict


def show(verdict: Verdict) -> None:
    """Prints a verdict."""
    sign = "right" if verdict.is_right else f"WRONG, {verdict.cause} was planted"
    if verdict.is_busy:
        sign = f"no verdict, others took {verdict.others_cores:.1f} cores; it would be {sign}"
    line = f"{verdict.where:9} {verdict.shape:9} {verdict.kind:24} {verdict.first} ({sign})"
    if verdict.others:
        line += f", then {', '.join(verdict.others)}"
    print(line)
    print(f"    {verdict.said}")
    figures = [f"{_figure(verdict.planted_per_s)} samples/s, judged in {verdict.judged_ms:.0f} ms"]
    if verdict.changed_per_s is not None:
        figures.append(f"changed {_figure(verdict.changed_per_s)}")
    if verdict.healthy_per_s is not None:
        figures.append(f"healthy {_figure(verdict.healthy_per_s)}")
    if verdict.won_back_frac is not None:
        figures.append(f"won back {100 * verdict.won_back_frac:.0f} %")
    if verdict.gain_measured is not None:
        predicted = "nothing" if verdict.gain_predicted is None else f"{verdict.gain_predicted:.2f}"
        figures.append(f"gain predicted {predicted}, measured {verdict.gain_measured:.2f}")
    print(f"    {'; '.join(figures)}", flush=True)


def _figure(value: float | None) -> str:
    return "no" if value is None else f"{value:.1f}"


@dataclass
class HealthyVerdict:
    """Verdict on a run without a fault."""

    kind: str
    shape: str
    where: str
    first: str
    notes: list[str]
    is_right: bool
    said: str
    judged_ms: float
    others_cores: float = 0.0
    is_busy: bool = False


def judge_healthy(machine_: Machine, healthy: Healthy, shape: Shape, traces: Path | None) -> HealthyVerdict:
    """Right is a run that is not accused: it is healthy, or it is not known whether it could be faster."""
    run = machine_.run(shape, healthy, healthy.code)
    if run.code:
        raise RuntimeError(f"{run.command}: {run.printed}")
    causes = [each["id"] for each in run.findings if each["severity"] != "info"]
    right = run.first in ("healthy", "unknown") and not causes
    said = run.findings[0]["text"] if run.findings else run.printed[-400:]
    if traces is not None and right:
        save_trace(run, healthy, traces / healthy.where / f"{healthy.kind}_{shape.name}.json.gz")
    names = healthy.kind, shape.name, healthy.where
    return HealthyVerdict(
        *names, run.first, run.notes, right, said, run.judged_ms, others_cores(run), is_busy=has_company(run)
    )


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they need be."""
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def confusion(verdicts: Sequence[Verdict]) -> str:
    """Planted kinds by what was found first."""
    rows = [["planted", "where", "cause", "right", "found first"]]
    for kind in dict.fromkeys(verdict.kind for verdict in verdicts):
        of_kind = [verdict for verdict in verdicts if verdict.kind == kind]
        found = {first: sum(one.first == first for one in of_kind) for first in (one.first for one in of_kind)}
        known = [one for one in of_kind if not one.is_busy]
        right = f"{sum(one.is_right for one in known)}/{len(known)}"
        rows.append([kind, of_kind[0].where, of_kind[0].cause, right, ", ".join(f"{n} {i}" for i, n in found.items())])
    return table(rows)


def won_back(verdicts: Sequence[Verdict]) -> str:
    """Returns the table of what the suggested overrides won."""
    rows = [["planted", "shape", "planted/s", "changed/s", "healthy/s", "won back", "predicted", "measured", "change"]]
    for one in verdicts:
        if one.has_cure or one.changed_per_s is not None:
            share = "" if one.won_back_frac is None else f"{100 * one.won_back_frac:.0f} %"
            gains = ["" if gain is None else f"{gain:.2f}" for gain in (one.gain_predicted, one.gain_measured)]
            rates = [_figure(rate) for rate in (one.planted_per_s, one.changed_per_s, one.healthy_per_s)]
            rows.append([one.kind, one.shape, *rates, share, *gains, " ".join(one.change)])
    return table(rows)


def summary(verdicts: Sequence[Verdict], healthy: Sequence[HealthyVerdict]) -> dict[str, Any]:
    """Returns the figures over all runs, except those on a busy machine."""
    both: list[Verdict | HealthyVerdict] = [*verdicts, *healthy]
    busy = [one for one in both if one.is_busy]
    verdicts = [one for one in verdicts if not one.is_busy]
    healthy = [one for one in healthy if not one.is_busy]
    untuned = {fault.kind for fault in UNTUNED}
    of_untuned = [one for one in verdicts if one.kind in untuned]
    shares = [one.won_back_frac for one in verdicts if one.has_cure and one.healthy_per_s is not None]
    errors = [one.gain_error_frac for one in verdicts if one.gain_error_frac is not None and one.is_right]
    return {
        "planted": len(verdicts),
        "kinds": len({one.kind for one in verdicts}),
        "right": sum(one.is_right for one in verdicts),
        "untuned": len(of_untuned),
        "untuned_right": sum(one.is_right for one in of_untuned),
        "busy": len(busy),
        "busy_right": sum(one.is_right for one in busy),
        "healthy": len(healthy),
        "healthy_right": sum(one.is_right for one in healthy),
        "called_healthy": sum(one.first == "healthy" for one in healthy),
        "curable": len(shares),
        "won_back_80": sum(share is not None and share >= 0.8 for share in shares),
        "gain_error_frac_median": statistics.median(errors) if errors else None,
        "judged_ms_max": max((one.judged_ms for one in both if not one.is_busy), default=0.0),
    }


def sentence(found: dict[str, Any]) -> str:
    """Returns the summary in words."""
    error = found["gain_error_frac_median"]
    said = f"The cause was first in {found['right']} of {found['planted']} planted runs ({found['kinds']} kinds); "
    said += "of the kinds that were added last, for which rules were then written, in "
    said += f"{found['untuned_right']} of {found['untuned']}; "
    if found["busy"]:
        said += f"{found['busy']} runs had no verdict, as other programs took the machine (beside them, the cause came "
        said += f"next in {found['busy_right']}); "
    said += f"{found['healthy_right']} of {found['healthy']} healthy runs were accused of nothing, "
    said += f"{found['called_healthy']} were called healthy; the printed override "
    said += f"won back 80 % and more in {found['won_back_80']} of {found['curable']} that a knob can cure; "
    said += "no gain was measured" if error is None else f"predicted gains were off by {100 * error:.0f} % (median)"
    return f"{said}. Judging a run took at most {found['judged_ms_max']:.0f} ms."


def _others(entries: Sequence[dict[str, Any]], now: Sequence[Any], kind: type[Any]) -> list[Any]:
    """Verdicts of a record but those that have been reached anew."""
    anew = {(one.kind, one.where, one.shape) for one in now}
    found = [kind(**entry) for entry in entries]
    return [one for one in found if (one.kind, one.where, one.shape) not in anew]


def judge_traces(folder: Path) -> None:
    """Judges recorded tables again; runs nothing."""
    rows, num_right = [["trace", "expected", "right", "found"]], 0
    with tempfile.TemporaryDirectory(prefix="diagnosis-") as place:
        for path in sorted(folder.glob("*/*.json.gz")):
            trace = json.loads(gzip.decompress(path.read_bytes()))
            for name in ("run.json", "steps.csv", "telemetry.csv", "metrics.csv"):
                (Path(place) / name).unlink(missing_ok=True)
            for name, text in trace["files"].items():
                (Path(place) / name).write_text(text)
            findings, expected = run_rules(Evidence.read(Path(place))), trace["expected"]
            causes = [one.id for one in findings if not one.is_note]
            ids = [one.id for one in findings]
            if expected["is_note"] or expected["cause"] == "healthy":
                right = not causes and bool({expected["cause"], *expected["also"]} & set(ids))
            else:
                right = bool(ids) and ids[0] in (expected["cause"], *expected["also"])
            num_right += right
            name = f"{path.parent.name}/{path.name.removesuffix('.json.gz')}"
            rows.append([name, expected["cause"], "right" if right else "WRONG", ", ".join(ids)])
    print(table(rows))
    print(f"{num_right} of {len(rows) - 1} traces are judged as recorded.")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="kinds, separated by commas; 'healthy' for those")
    parser.add_argument("--shapes", default=",".join(shape.name for shape in SHAPES))
    parser.add_argument("--where", default="cpu,simulated")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--list", action="store_true", help="print the kinds")
    parser.add_argument("--no-after", action="store_true", help="leave out the runs with the change and the cure")
    parser.add_argument("--keep", type=Path, help="a folder for the run folders")
    parser.add_argument("--traces", type=Path, help="a folder for what tests judge again: tests/traces")
    parser.add_argument("--judge", type=Path, metavar="TRACES", help="judge what --traces has kept, and run nothing")
    parser.add_argument("--out", type=Path, help="the record")
    parser.add_argument("--again", action="store_true", help="what is planted now replaces its part of the record")
    chosen = parser.parse_args()
    if chosen.list:
        print(table([[each.where, each.kind, getattr(each, "cause", "healthy")] for each in [*FAULTS, *HEALTHY]]))
        return
    if chosen.judge:
        judge_traces(chosen.judge)
        return
    only = set(filter(None, chosen.only.split(",")))
    shapes = [shape for shape in SHAPES if shape.name in chosen.shapes.split(",")]

    def wanted(planted: Fault | Healthy) -> bool:
        names = {planted.kind, planted.cause if isinstance(planted, Fault) else "healthy"}
        return planted.where in chosen.where.split(",") and (not only or bool(names & only))

    began_s = time.monotonic()
    verdicts: list[Verdict] = []
    healthy: list[HealthyVerdict] = []
    with contextlib.ExitStack() as stack:
        folder = chosen.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="diagnosis-")))
        folder.mkdir(parents=True, exist_ok=True)
        machine_ = stack.enter_context(Machine(folder.resolve()))
        for _ in range(chosen.repeats):
            for fault in filter(wanted, FAULTS):
                for shape in (one for one in shapes if not fault.shapes or one.name in fault.shapes):
                    verdicts.append(
                        judge_fault(machine_, fault, shape, has_after=not chosen.no_after, traces=chosen.traces)
                    )
                    show(verdicts[-1])
            for each in filter(wanted, HEALTHY):
                for shape in shapes:
                    found = judge_healthy(machine_, each, shape, chosen.traces)
                    healthy.append(found)
                    sign = "right" if found.is_right else "WRONG, nothing was planted"
                    if found.is_busy:
                        sign = f"no verdict: others took {found.others_cores:.1f} cores"
                    print(f"{found.where:9} {found.shape:9} {found.kind:24} {found.first} ({sign}) {found.notes or ''}")
                    print(f"    {found.said}", flush=True)
    commands = [" ".join(["python", "benchmarks/diagnosis.py", *sys.argv[1:]])]
    each_run = ROOT / "logs" / chosen.out.name if chosen.out else None
    if chosen.again and each_run and each_run.exists():
        earlier = json.loads(each_run.read_text())
        commands = [*earlier["commands"], *commands]
        verdicts = [*_others(earlier["planted"], verdicts, Verdict), *verdicts]
        healthy = [*_others(earlier["healthy"], healthy, HealthyVerdict), *healthy]
    if verdicts:
        print(f"\n{confusion(verdicts)}\n\n{won_back(verdicts)}\n")
    counts = summary(verdicts, healthy)
    config = {
        "minutes": (time.monotonic() - began_s) / 60,
        "card": CARD if "simulated" in chosen.where.split(",") else None,
        "shapes": [asdict(shape) for shape in shapes],
        "faults": [fault.kind for fault in FAULTS],
        "healthy": [each.kind for each in HEALTHY],
    }
    results = [counts, {"confusion": confusion(verdicts).splitlines() if verdicts else []}]
    finish("diagnosis", results, sentence(counts), chosen.out, config=config, command="; ".join(commands))
    if each_run:
        each_run.parent.mkdir(exist_ok=True)
        runs = {"planted": [asdict(one) for one in verdicts], "healthy": [asdict(one) for one in healthy]}
        each_run.write_text(json.dumps({"commands": commands, **runs}).replace(f"{ROOT}/", ""))


if __name__ == "__main__":
    main()
