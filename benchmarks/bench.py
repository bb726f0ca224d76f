"""Measures everything that docs/benchmarks.md shows, each case in turns with its peer, in less than 20 minutes.

    make bench
    python benchmarks/bench.py [--only commands loop] [--rounds 5] [--minutes 20] [--add] [--out RECORD]
    python benchmarks/bench.py --page [RECORD]

Each theme is another script of this folder, run as a process of its own. After each theme build/bench.json is written,
so that an interruption loses no more than the theme that runs. The record of the day is written once all themes are
done. Peers are the extra `bench` of pyproject.toml; a peer that is not installed is a row without figures. If other
programs take more than `BUSY_FRAC` of the CPU time during a theme, its rows have no verdict. `--add` measures themes
again and keeps the others of the newest record. `--page` writes the tables of docs/benchmarks.md from a record, the
newest by default.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import psutil  # noqa: E402

from benchmarks.measuring import COUNTED, NOT_INSTALLED, finish  # noqa: E402

PAGE = ROOT / "docs" / "benchmarks.md"
RECORDS = ROOT / "benchmarks" / "records"
DONE = ROOT / "build" / "bench.json"
"""What is measured so far."""
BUSY_FRAC = 0.1
SHOWN = {"busy": "machine busy: no verdict", "level": "level within noise"}
"""Texts of the page for verdicts."""
LIMIT_S = 480.0
"""Seconds after which a theme is ended and counts as failed."""
THEMES: Mapping[str, Sequence[str]] = {
    "answers": ["startup.py", "--runs", "{rounds}"],
    "commands": ["startup.py", "--whole", "--runs", "{rounds}"],
    "loop": ["loop.py", "--rounds", "{rounds}", "--steps", "1500"],
    "steps": ["loop.py", "--rounds", "{rounds}", "--steps", "300", "--model", "wide", "--only", "ours"],
    "studies": ["sweep.py", "--whole", "--rounds", "{rounds}"],
    "telemetry": ["telemetry_cost.py", "--peers", "--windows", "{rounds}", "--window-s", "8"],
    "triplets": ["loader.py", "--rounds", "{rounds}"],
    "windows": ["forecast_loading.py", "--rounds", "{rounds}"],
    "crops": ["restoration_loading.py", "--rounds", "{rounds}"],
    "recommender": ["recsys_recbole.py", "--rounds", "{rounds}"],
}
"""Script and arguments of each theme."""
_SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER of prctl(2)."""


def cpu_s() -> tuple[float, float]:
    """Returns the seconds that all CPUs were busy, and those that this process and its ended children took."""
    machine = psutil.cpu_times()
    idle_s = machine.idle + getattr(machine, "iowait", 0.0)
    taken_s = sum(machine) - idle_s - getattr(machine, "guest", 0.0) - getattr(machine, "guest_nice", 0.0)
    return taken_s, sum(os.times()[:4])


def reap() -> None:
    """Collects processes that a theme has left behind and that have ended, so that their CPU time counts as its own."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def run(name: str, rounds: int, limit_s: float = LIMIT_S) -> dict[str, Any]:
    """Returns what a theme gives: rows, seconds, and the share of the CPUs that other programs took."""
    script, *words = [word.format(rounds=rounds) for word in THEMES[name]]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "record.json"
        command = [sys.executable, str(ROOT / "benchmarks" / script), *words, "--out", str(out)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
        began_s, before = time.perf_counter(), cpu_s()
        with (Path(folder) / "printed").open("w+") as printed:
            failure = ended_badly(command, environment, printed, limit_s)
            reap()
            seconds, after = time.perf_counter() - began_s, cpu_s()
            if failure:
                printed.seek(0)
                print(printed.read()[-4000:], file=sys.stderr)
        found = {} if failure else json.loads(out.read_text(encoding="utf-8"))
    others_s = max(0.0, (after[0] - before[0]) - (after[1] - before[1]))
    others_frac = others_s / seconds / (psutil.cpu_count() or 1)
    rows = [{"theme": name, **row} for row in found.get("compared", ())]
    if failure:
        rows = [{"theme": name, "what": " ".join(["python", f"benchmarks/{script}", *words]), "verdict": failure}]
    elif others_frac > BUSY_FRAC:
        rows = [row if row["verdict"] in (NOT_INSTALLED, COUNTED) else {**row, "verdict": "busy"} for row in rows]
    return {
        "rows": rows,
        "theme": {"theme": name, "seconds": round(seconds, 1), "others_frac": round(others_frac, 3)},
    }


def ended_badly(command: Sequence[str], environment: Mapping[str, str], printed: Any, limit_s: float) -> str:
    """Runs a command in a session of its own and returns why it failed; empty if it did not. Nothing of it is left."""
    options: dict[str, Any] = {"cwd": ROOT, "env": environment, "stdout": printed, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, start_new_session=True, stdin=subprocess.DEVNULL, **options) as process:
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return f"failed: not done after {limit_s:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return f"failed: exit code {code}" if code else ""


def peers() -> dict[str, str]:
    """Returns the versions of the peers that are installed."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    pinned = [name for name, _, number in (each.partition("==") for each in extras["bench"]) if number]
    found = {}
    for name in (*pinned, "recbole", "optuna", "hydra-core", "torch", "lightning", "wandb"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


# -- the page ----------------------------------------------------------------------------------------------------------


def figure(value: float | None) -> str:
    """Returns a figure with three digits, or with all those before the point."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def table(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Returns the lines of the table that compares."""
    lines = ["| what | wellfed | peer | the peer's | times better (95 %) |", "|---|---|---|---|---|"]
    for row in rows:
        what = f"{row['what']}, {row['unit']}" if row.get("unit") else row["what"]
        last = SHOWN.get(row["verdict"], row["verdict"])
        if row["verdict"] in ("better", "worse", "level"):
            bounds = " to ".join(map(figure, row["ci95"]))
            last = f"{figure(row['times'])} ({bounds})" + ("" if last == "better" else f": {last}")
        elif row["verdict"] == COUNTED:
            last = f"{figure(row['times'])} ({COUNTED})"
        cells = (what, figure(row.get("ours")), row.get("peer", ""), figure(row.get("theirs")), last)
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def page(text: str, record: Path) -> str:
    """Returns the text of the page with the tables and the name of a record in place of those it has."""
    found = json.loads(record.read_text(encoding="utf-8"))
    if lacking := THEMES.keys() - {theme["theme"] for theme in found["themes"]}:
        raise SystemExit(f"{record} lacks {', '.join(sorted(lacking))}. Measure them, with --add --only.")
    machine, taken_s = found["machine"], sum(theme["seconds"] for theme in found["themes"])
    versions = [f"| {name} | {number} |" for name, number in found["peers"].items()]
    said = (
        f"Measured on {found['date']} on {machine['cpu']}, {machine['cpu_quota_cores']:g} cores, in {taken_s / 60:.0f} "
        f"minutes ([record](../benchmarks/records/{record.name}))."
    )
    for pattern, lines in (
        (r"Measured on .*\n", [said]),
        (r"\| what \| wellfed .*\n(\|.*\n)*", table(row for row in found["results"] if row["theme"] in THEMES)),
        (r"\| package \| version .*\n(\|.*\n)*", ["| package | version |", "|---|---|", *versions]),
    ):
        text, number = re.subn(pattern, lambda _, lines=lines: "\n".join([*lines, ""]), text)
        if number != 1:
            raise SystemExit(f"{PAGE} has {number} places that match {pattern!r}; there must be one.")
    return text


def newest() -> Path:
    """Returns the newest record of all themes."""
    return max(RECORDS.glob("*_bench_cpu.json"))


def _number(row: Mapping[str, Any]) -> int:
    return list(THEMES).index(row["theme"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=THEMES, default=list(THEMES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=20.0, help="a theme that is not done by then is ended")
    parser.add_argument("--out", type=Path, help="default: that of today, if it then has all themes")
    parser.add_argument("--add", action="store_true", help="keep the other themes of the record")
    parser.add_argument("--page", nargs="?", type=Path, const=Path(), help="write the page from a record; run nothing")
    asked = parser.parse_args()
    if asked.page is not None:
        record = newest() if asked.page == Path() else asked.page
        PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), record), encoding="utf-8")
        return
    of_today = RECORDS / f"{datetime.now(UTC):%Y-%m-%d}_bench_cpu.json"
    out: Path = asked.out or DONE
    out.parent.mkdir(parents=True, exist_ok=True)
    for ending in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(ending) is not signal.SIG_IGN:  # of nohup
            signal.signal(ending, lambda number, _: sys.exit(128 + number))  # ends the theme that runs, too
    with contextlib.suppress(OSError, AttributeError):  # Linux alone
        ctypes.CDLL(None).prctl(_SUBREAPER, 1)
    ends_at_s = time.monotonic() + 60 * asked.minutes
    kept: dict[str, Any] = json.loads((asked.out or newest()).read_text(encoding="utf-8")) if asked.add else {}
    rows, themes = (
        [each for each in kept.get(key, ()) if each["theme"] in THEMES.keys() - {*asked.only}]
        for key in ("results", "themes")
    )
    for name in asked.only:
        print(f"-- {name}", flush=True)
        found = run(name, asked.rounds, min(LIMIT_S, max(0.0, ends_at_s - time.monotonic())))
        rows, themes = [*rows, *found["rows"]], [*themes, found["theme"]]
        print("\n".join(table(found["rows"])[2:]))
        rows, themes = (sorted(each, key=_number) for each in (rows, themes))
        left = [each for each in asked.only if each not in {theme["theme"] for theme in themes}]
        says = f"{len(themes)} themes in {sum(theme['seconds'] for theme in themes):.0f} s"
        says += f"; not run: {', '.join(left)}." if left else "."
        config = {"rounds": asked.rounds, "busy_frac": BUSY_FRAC}
        finish("bench", rows, says, out, config=config, themes=themes, peers=peers())
    if asked.out is None and {theme["theme"] for theme in themes} == set(THEMES):
        out.replace(of_today)
    if failed := [row["theme"] for row in rows if row["verdict"].startswith("failed")]:
        raise SystemExit(f"Failed: {', '.join(failed)}.")


if __name__ == "__main__":
    main()
