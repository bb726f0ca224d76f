"""A study of ``python src/train.py -m``: what sweep and search share, with a leaderboard at the end."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from wellfed import project
from wellfed.command_line import typed_arguments
from wellfed.config.entry import config_flags, config_folders
from wellfed.config.multirun import Multirun
from wellfed.config.schema import RunConfig
from wellfed.errors import EXIT_FAILED, EXIT_OK, ConfigError
from wellfed.masking import masked_override
from wellfed.study import ledger
from wellfed.study.board import files, terminal
from wellfed.study.code_version import option_files, read_by_trials, study_code
from wellfed.study.executors.executor import Launch
from wellfed.study.ranking.board_entry import Leaderboard
from wellfed.study.request import StudyRequest
from wellfed.study.study import Study
from wellfed.study.study_files import SEARCH, SWEEP, SearchFile, SweepFile

File = TypeVar("File", SweepFile, SearchFile)


@dataclass
class MultirunStudy(Study):
    """One command of a sweep or a search.

    ``launcher`` is the configuration of another launcher than ours. ``launch`` runs jobs by it, where its machines are
    unknown to us. Both are None for processes of our own, one a GPU at a time.
    """

    multirun: Multirun
    config: RunConfig
    """Configuration that all points share."""
    asked: StudyRequest
    launcher: Mapping[str, Any] | None
    launch: Launch | None

    def __post_init__(self) -> None:
        self.way_on = self.asked.way_on

    @property
    @abstractmethod
    def file(self) -> SweepFile | SearchFile:
        """Facts that the trials share, as known by now."""

    @abstractmethod
    def board(self) -> Leaderboard:
        """Returns the leaderboard of the rows so far."""

    @cached_property
    def code(self) -> str:
        """Version of the code."""
        return study_code(self._options)

    @property
    def _options(self) -> list[Path]:
        """Files that options of the points may be in."""
        where = config_folders(typed_arguments())
        folders = [where["config_dir"] or project.configs(), *map(Path, where["extra_dirs"])]
        return option_files(folders, self.asked.options)

    def sources(self) -> list[str] | None:
        """Returns what trials read when they begin; None if a folder is just being replaced."""
        try:
            return read_by_trials(self._options)
        except OSError:
            return None

    @property
    def facts(self) -> dict[str, Any]:
        """Facts that the files of both kinds of study have."""
        return {
            "name": self.asked.name,
            "workload": self.config.workload.name,
            "fixed": tuple(map(masked_override, self.asked.fixed)),
            "code": self.code,
            "flags": tuple(config_flags(typed_arguments())),
        }

    def read_earlier(self, kind: type[File]) -> File | None:
        """Returns what the folder holds; None if that is nothing, or unknown, which is reported.

        Raises:
            ConfigError: it holds the other kind of study, whose rows would be taken for its own.
        """
        (other,) = {SWEEP, SEARCH} - {kind.folder_kind}
        if (self.folder / other.marker).exists():
            problem = f"holds a {other.noun}; this is a {kind.folder_kind.noun}, and each needs a folder of its own."
            raise ConfigError.of(str(self.folder), problem, f"Set another: hydra.sweep.dir={self.folder}_2")
        try:
            return kind.read(self.folder)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            self.screen.say(f"{error} It is written anew.")
            return None

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
            self.screen.say(f"The leaderboard can't be written: {error}. The rows are in {ledger.FILE_NAME}.")
        return board

    def finish(self) -> int:
        """Writes and shows the leaderboard of what is there; returns the exit code."""
        if self.trials is None:
            return EXIT_FAILED
        self.screen.end()
        board = self.write_board()
        terminal.show(self.screen.console, board, [self.folder / name for name in files.NAMES])
        return EXIT_FAILED if board.best is None else EXIT_OK
