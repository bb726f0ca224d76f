"""Writes the page of a run that still runs, in a process of its own: ``python -m wellfed.explain.report.renewal RUN``.

`wellfed.run.page_renewal` starts it now and then. It reads the files of the run, so that it never holds up a step.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

MOST_FRAC = 0.01
"""Largest share of a core that renewals may take. A page that needs more than 0.6 s of it is renewed less often."""
_MOST_BYTES = 2**30
"""Memory that a renewal may allocate, about 3 million steps."""


def main(folder: Path) -> float:
    """Writes the page of the run unless it has ended, and returns the least seconds until the next renewal.

    Raises:
        Exception: the page could not be drawn or written; the old page stays.
    """
    # Imported here: `yield_to_the_run` goes first.
    from wellfed.explain.diagnosis.evidence import Evidence
    from wellfed.explain.diagnosis.run_rules import conclude
    from wellfed.explain.report.run_lines import RENEWED_EVERY_S
    from wellfed.explain.report.run_page import to_html
    from wellfed.explain.report.write import PAGE
    from wellfed.record import write_atomically

    evidence = Evidence.read(folder)
    if evidence.record.status in ("running", "killed"):
        conclude(evidence)
        every_s = max(RENEWED_EVERY_S, 2 * _paid_after_s())  # drawing takes about as long as reading
        write_atomically(folder / PAGE, to_html(evidence, folder, renewed_every_s=every_s))
    return _paid_after_s()


def _paid_after_s() -> float:
    """Returns the seconds of which the CPU time of this process is `MOST_FRAC`."""
    return time.process_time() / MOST_FRAC


def yield_to_the_run() -> None:
    """Gives way to the training in all that it shares with this process: CPUs and memory. Ends cleanly on SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    if hasattr(os, "nice"):
        os.nice(19)
    if hasattr(os, "sched_setaffinity"):  # the parent may be bound to one CPU, where its own thread works
        with suppress(OSError):
            os.sched_setaffinity(0, range(os.cpu_count() or 1))
    with suppress(OSError):  # where memory runs out, the kernel prefers this process
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    with suppress(ImportError, OSError, ValueError):
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (_MOST_BYTES, hard))


if __name__ == "__main__":
    yield_to_the_run()
    print(main(Path(sys.argv[1])))
