"""Runs trials by another launcher of Hydra's, e.g. ``hydra/launcher=basic``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Self

from wellfed.config.quoting import assigned
from wellfed.record import RunRecord
from wellfed.study.executors.executor import Launch, StudySettings, Trial, TrialEnd
from wellfed.study.executors.local import open_trial_folder
from wellfed.study.row import Row


class OtherLauncher:
    """An executor that hands all trials over at once. Rows come when all have ended, without time limits."""

    def __init__(self, settings: StudySettings, launch: Launch) -> None:
        self._settings, self._launch = settings, launch

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def run(
        self,
        trials: Sequence[Trial] = (),
        more: Callable[[], Trial | None] | None = None,
        *,
        alone: bool = False,
        prune: Callable[[Trial, int, float], str | None] | None = None,
    ) -> Iterator[tuple[Trial, Row]]:
        """Runs trials as `Executor.run` says."""
        folder = self._settings.folder
        handed_over = [*trials, *(iter(more, None) if more is not None else ())]
        jobs = []
        for trial in handed_over:
            open_trial_folder(folder / trial.row.folder)
            where = [assigned("hydra.sweep.dir", str(folder.absolute())), f"hydra.sweep.subdir={trial.row.folder}"]
            jobs.append([*trial.overrides, *where])
        if jobs:
            self._launch(jobs)
        for trial in handed_over:
            yield trial, self._settings.row_of(trial.row, self._end(trial), folder)

    def start_no_more(self) -> None:
        """Does nothing: all trials are handed over at once."""

    def _end(self, trial: Trial) -> TrialEnd:
        """Returns how a trial has ended, by its record."""
        try:
            found = RunRecord.read(self._settings.folder / trial.row.folder)
        except (OSError, ValueError):
            found = None
        if found is None or found.status in ("running", "killed", "interrupted"):
            return TrialEnd(not_started="failed", message="left no complete record")
        return TrialEnd(code=found.exit_code or 0, seconds=found.duration_s, host=found.host_name or "")
