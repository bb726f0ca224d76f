"""Reads fresh damaged files of every kind until the time is over, and prints a table. Exit code 1 after a fault.

make fuzz
make fuzz MINUTES=60 ARGS="--only checkpoint --seed 7"
make fuzz MINUTES=60 ARGS=--record

An input that goes wrong is written to tests/fuzz/corpus/, where `make test` reads it from then on. The printed command
makes it again.
"""

import argparse
import os
import random
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from tests.faults import page
from tests.fuzz.child import Outcome, fuzz_until
from tests.fuzz.readers import READERS

CONTEXT = "spawn"
"""Start method of the processes."""


def main(words: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    parser = argparse.ArgumentParser(prog="make fuzz", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5.0, help="default 5")
    parser.add_argument("--only", default="", metavar="TEXT", help="readers whose name contains this")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32), help="default: another each time")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="at the same time (default 2)")
    parser.add_argument("--record", action="store_true", help="write a record, and its table into docs/reliability.md")
    given = parser.parse_args(words)
    chosen = [number for number, reader in enumerate(READERS) if given.only in reader.name]
    print(f"seed {given.seed}", flush=True)
    found: dict[str, Outcome] = {}
    until_s = time.monotonic() + 60 * given.minutes
    with ProcessPoolExecutor(given.jobs, get_context(CONTEXT)) as pool:
        turn = 0
        while time.monotonic() < until_s and chosen:
            random.Random(given.seed + turn).shuffle(chosen)  # a short time then reaches other readers each time
            seeds = [given.seed + turn] * len(chosen)
            for outcome in pool.map(fuzz_until, chosen, seeds, [until_s] * len(chosen)):
                found[outcome.reader] = _sum(found.get(outcome.reader), outcome)
                if outcome.fault:
                    kept = "before the first input" if outcome.culprit is None else outcome.keep()
                    again = f'make fuzz ARGS="--only {outcome.reader} --seed {given.seed + turn}"'
                    print(f"{outcome.reader}: {outcome.fault}\n    {kept}\n    again: {again}", flush=True)
            chosen = [number for number in chosen if not found[READERS[number].name].fault]
            turn += 1
    print(f"{'reader':20} {'inputs':>8} {'refused':>8} {'slowest':>10} {'memory':>10}  fault")
    for name, total in found.items():
        figures = f"{total.inputs:8} {total.refused:8} {total.slowest_s:8.2f} s {total.most_mib:6.0f} MiB"
        print(f"{name:20} {figures}  {total.fault}")
    faults = sum(bool(total.fault) for total in found.values())
    inputs = sum(total.inputs for total in found.values())
    print(f"\n{inputs} inputs, {faults} readers with a fault, seed {given.seed}")
    if given.record:
        says = f"{inputs:,} damaged inputs of {len(found)} kinds, {faults} kinds with a fault."
        rows = [
            [total.reader, total.inputs, total.refused, round(total.slowest_s, 2), round(total.most_mib), total.fault]
            for total in sorted(found.values(), key=lambda total: total.reader)
        ]
        only = f"--only {given.only} " if given.only else ""
        command = f'make fuzz MINUTES={given.minutes:g} ARGS="{only}--seed {given.seed} --record"'
        page.write("fuzz", rows, says, {"minutes": given.minutes, "seed": given.seed}, command)
    return 1 if faults else 0


def _sum(before: Outcome | None, new: Outcome) -> Outcome:
    if before is None:
        return new
    return Outcome(
        new.reader,
        before.inputs + new.inputs,
        before.refused + new.refused,
        max(before.slowest_s, new.slowest_s),
        max(before.most_mib, new.most_mib),
        before.fault or new.fault,
    )


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main(sys.argv[1:]))
