"""An executor whose trials end as a test says, without processes."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.kit.made_rows import folder_name, write_rows
from wellfed.process import StopRequest
from wellfed.study.executors.executor import Ended, Executor, More, Prune, StudySettings
from wellfed.study.rows import Row
from wellfed.study.trial_end import Trial, TrialEnd


def row_of(trial: Trial, **known: Any) -> Row:
    """The row of a trial that ended well."""
    point = trial.beside or trial.point.id
    figures = {"status": "ok", "exit_code": 0, "attempt": trial.attempt, "trial": trial.number, **known}
    return Row(point, trial.kind, trial.point.overrides, **figures)


class PlayedTrials(Executor):
    """Each trial ends as ``play`` says, which is written into its folder within ``folder``.

    ``curve`` gives the metric at the validations of a trial that may be pruned, until it is.
    """

    def __init__(
        self,
        folder: Path,
        play: Callable[[Trial], Row] = row_of,
        curve: Callable[[Trial], Sequence[float]] = lambda trial: (),
    ) -> None:
        settings = StudySettings(folder, folder, 1, 1, "sweep", str, StopRequest())  # type: ignore[arg-type]
        super().__init__(settings)
        self._play, self._curve = play, curve
        self.pruned: dict[str, str] = {}
        """Reason for which a trial was pruned, by its folder."""
        self.ran: list[Trial] = []
        """Trials that were begun, in order."""

    def run(
        self, trials: Iterable[Trial] = (), more: More | None = None, *, alone: bool = False, prune: Prune | None = None
    ) -> Ended:
        waiting = list(trials)
        while self._is_open and (trial := waiting.pop(0) if waiting else None if more is None else more()) is not None:
            self.ran.append(trial)
            told, why = [], None
            for number, value in enumerate(self._curve(trial), start=1):
                told.append(value)
                why = prune(trial, number, value) if prune and trial.may_be_pruned else None
                if why:
                    self.pruned[trial.folder] = why
                    break
            row = self._play(trial)
            if row.exit_code is None:
                end = TrialEnd(not_started=row.status, message=str((row.error or {}).get("message")))
            else:
                events = [{"kind": "pruned"}] if why else []
                write_rows(self.settings.folder, [row], events=events)
                own = self.settings.folder / folder_name(row)
                if told:
                    lines = [f"val,score,{number},{value}" for number, value in enumerate(told, start=1)]
                    (own / "metrics.csv").write_text("\n".join(["split,name,step,value", *lines]) + "\n")
                end = TrialEnd(code=row.exit_code, seconds=row.seconds)
            yield trial, end
