"""A study of ``python src/train.py -m``: what sweep and search share, with a leaderboard at the end."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

from wellfed.config.multirun import Multirun
from wellfed.config.schema import RunConfig
from wellfed.errors import EXIT_FAILED, EXIT_OK, ConfigError
from wellfed.masking import masked_override
from wellfed.study.board import files, terminal
from wellfed.study.executors.executor import Launch
from wellfed.study.ranking.board_entry import Leaderboard
from wellfed.study.request import StudyRequest
from wellfed.study.study import Study, Trials
from wellfed.study.study_files import SEARCH, SWEEP, SearchFile, SweepFile, study_code

File = TypeVar("File", SweepFile, SearchFile)


@dataclass
class MultirunStudy(Study):
    """One command of a sweep or a search."""

    multirun: Multirun
    config: RunConfig
    """Configuration that all points share."""
    asked: StudyRequest
    launch: Launch | None
    """Runs jobs by another launcher of Hydra; None = in processes forked here, one a GPU at a time."""

    def __post_init__(self) -> None:
        self.way_on = self.asked.way_on

    @property
    @abstractmethod
    def file(self) -> SweepFile | SearchFile:
        """Facts that the trials share."""

    @abstractmethod
    def board(self) -> Leaderboard:
        """Returns the leaderboard of the rows so far."""

    @cached_property
    def code(self) -> str:
        """Version of the code."""
        return study_code()

    @property
    def facts(self) -> dict[str, Any]:
        """Facts that the files of both kinds of study have."""
        return {
            "name": self.asked.name,
            "workload": self.config.workload.name,
            "fixed": tuple(map(masked_override, self.asked.fixed)),
            "code": self.code,
            "flags": tuple(map(masked_override, self.multirun.flags)),
        }

    def read_earlier(self, kind: type[File]) -> File | None:
        """Returns what the folder holds; None if that is nothing.

        Raises:
            ConfigError: it holds another kind of study, or one of another version.
        """
        (other,) = {SWEEP, SEARCH} - {kind.folder_kind}
        problem = f"holds a {other.noun}; this is a {kind.folder_kind.noun}, and each needs a folder of its own."
        if not (self.folder / other.marker).exists():
            try:
                return kind.read(self.folder)
            except FileNotFoundError:
                return None
            except (OSError, ValueError) as error:
                problem = f"can't be read: {error}"
        raise ConfigError.of(str(self.folder), problem, f"Set another: hydra.sweep.dir={self.folder}_2")

    def report_earlier(self, trials: Trials, progress: str) -> None:
        """Reports that the rows of an earlier command are kept, and which of them can be measured again."""
        say, noun, kept = self.screen.say, self.file.folder_kind.noun, trials.kept
        say(f"Going on in {self.folder}: {progress}")
        codes = {row.code for row in kept.latest.values() if row.status == "ok"} - {self.code}
        if codes:
            say(
                f"The code has changed since ({', '.join(sorted(codes))} -> {self.code}): what was measured before is "
                f"kept. To measure it again: {noun}.retry=[ok], or another {noun}.name."
            )
        ended = {row.status for row in kept.latest.values()} & {"oom", "failed", "killed", "timeout"}
        if left := sorted(ended - set(kept.retry)):
            say(f"Trials that failed are kept; {noun}.retry=[{','.join(left)}] runs them again.")

    def write_board(self, *notes: str) -> Leaderboard:
        """Writes the leaderboard of the rows so far, and returns it; reports files that can't be written.

        Args:
            notes: notes before its own.
        """
        board = self.board()
        board = replace(board, notes=(*notes, *board.notes))
        try:
            board.file.write(self.folder)
            files.write(self.folder, board)
        except OSError as error:
            self.screen.say(f"The leaderboard can't be written: {error}. The trials are in {self.folder}.")
        return board

    def finish(self) -> int:
        """Writes and shows the leaderboard of what is there; returns the exit code."""
        if self.trials is None:
            return EXIT_FAILED
        board = self.write_board()
        terminal.show(self.screen.console, board, [self.folder / name for name in files.NAMES])
        return EXIT_FAILED if board.best is None else EXIT_OK
