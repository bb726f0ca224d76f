"""Plants every fault of `cases.FAULTS` and prints a table. Exit code 1 if a run did not survive its fault.

make faults
make faults ARGS="--only SIGTERM --keep /tmp/faults"
make faults ARGS=--record
"""

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path

from tests.faults import page
from tests.faults.cases import FAULTS, tried
from tests.faults.harness import Case


def main(words: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    parser = argparse.ArgumentParser(prog="make faults", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="faults whose name contains this")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="leave the run folders there")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="at the same time (default 2)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the table as JSON, too")
    parser.add_argument("--record", action="store_true", help="write a record, and its table into docs/reliability.md")
    given = parser.parse_args(words)
    chosen = [number for number, fault in enumerate(FAULTS) if given.only in fault.kind]
    began_s, cases = time.monotonic(), list[Case]()
    with tempfile.TemporaryDirectory(prefix="faults-") as temporary:
        root = given.keep or Path(temporary)
        root.mkdir(parents=True, exist_ok=True)
        with ProcessPoolExecutor(given.jobs, multiprocessing.get_context("spawn")) as pool:
            for case in pool.map(tried, chosen, [str(root)] * len(chosen)):
                cases.append(case)
                print(row(case), flush=True)
    bad = [case for case in cases if case.faults]
    skipped = sum(bool(case.skipped) for case in cases)
    minutes = (time.monotonic() - began_s) / 60
    print(f"\n{len(cases) - skipped - len(bad)} of {len(cases) - skipped} survived, {skipped} not tried here")
    print(f"{minutes:.0f} minutes, {given.jobs} at a time on {len(os.sched_getaffinity(0))} CPUs")
    if given.out is not None:
        given.out.write_text(json.dumps([asdict(case) for case in cases], indent=1) + "\n")
    if given.record:
        page.write_faults(cases, round(minutes, 1), given.jobs)
    return 1 if bad else 0


def row(case: Case) -> str:
    """Returns a line of the table, and one for each fault of the run."""
    survived = "skipped" if case.skipped else "NO" if case.faults else "yes"
    code = "" if case.code is None else str(case.code)
    line = f"{case.kind:56.56} {survived:8} {case.status:12} {code:>4}  {case.lost:24} {case.seconds:5.0f} s"
    return "\n".join(
        [
            line,
            *(f"    {text}" for text in [*case.faults, *([case.message] if case.faults else []), case.skipped] if text),
        ]
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
