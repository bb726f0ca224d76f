"""Starts one run on the ranks that torchrun or srun has started: rank 0 composes it, all others do as it says."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from wellfed.command_line import words
from wellfed.config.compose import Composed
from wellfed.config.schema import RunConfig
from wellfed.errors import EXIT_FAILED, EXIT_NOTHING_RUN, EXIT_OK, ConfigError
from wellfed.ranks import launched
from wellfed.run.ending import Outcome
from wellfed.run.ranks.line import Line

Job = Callable[[Composed[RunConfig]], int]


def on_all_ranks(main: Callable[[Job], int]) -> int:
    """The exit code of this rank.

    Args:
        main: composes what the command line says and calls the job with it, as `wellfed.config.entry.main` does;
            called on rank 0 alone, and where nobody has started several.
    """

    def alone(composed: Composed[RunConfig]) -> int:
        from wellfed.run.train import train

        return train(composed)

    launch = launched()
    if launch is None or launch.world_size == 1:
        return main(alone)
    if {"-m", "--multirun"} & set(words()):
        problem = f"is for many runs, and {launch.by} has started the ranks of one."
        if launch.rank == 0:
            print(ConfigError.of("-m", problem, f"Start it without {launch.by}."), file=sys.stderr)
        return EXIT_NOTHING_RUN

    line, code = Line(launch), EXIT_FAILED

    def leading(composed: Composed[RunConfig]) -> int:
        from wellfed.run.train import train

        return train(composed, line=line)

    try:
        if launch.rank == 0:
            code = main(leading)
        else:
            from wellfed.run.ranks.following import follow

            code = follow(line)
    finally:
        line.close(Outcome("ok" if code == EXIT_OK else "invalid", code))
    if line.is_broken:  # threads of a collective that has lost a rank may never end
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code
