"""Asks Optuna which values to try next and gives it the results: the one file that imports it.

The state is in the journal file of the search's folder, which no other process writes to. The same command after a kill
goes on from there.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, Trial, TrialState

from wellfed.errors import ConfigError
from wellfed.study.points import space as spaces
from wellfed.study.points.space import Choices, Space
from wellfed.study.row import Outcome

JOURNAL = "optuna.journal"
_NAME = "search"
_STARTUP = 5
"""Trials trained to their end before the median pruner starts."""
_FIRST_PRUNED = 2
"""The first validation after which the median pruner may end a trial."""
_ASHA = {"min_resource": 1, "reduction_factor": 3}


@dataclass(frozen=True)
class AskedTrial:
    """A trial that has begun and has no result yet."""

    number: int
    values: dict[str, str]
    """Axis -> value, as typed."""


class OptunaStudy:
    """One study of Optuna, in a folder that only this process writes to.

    Args:
        parallel: trials that run at a time.

    Raises:
        ConfigError: the file is no journal.
    """

    def __init__(
        self,
        folder: Path,
        space: Space,
        *,
        mode: str,
        sampler: str,
        pruner: str,
        seed: int,
        parallel: int = 1,
    ) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._space = space
        self._distributions = {name: _distribution(axis) for name, axis in space.items()}
        self._path = folder / JOURNAL
        self._running: dict[int, Trial] = {}
        try:
            _mend(self._path)
            storage = JournalStorage(JournalFileBackend(str(self._path)))
            names = [study.study_name for study in storage.get_all_studies()]
        except (ValueError, KeyError, TypeError) as error:
            problem = f"can't be read as a journal of Optuna: {error}."
            way_out = f"Give this one a folder of its own: search.name={folder.name}_2. What is there stays as it is."
            raise ConfigError.of(str(self._path), problem, way_out) from error
        direction: Literal["minimize", "maximize"] = "maximize" if mode == "max" else "minimize"
        if _NAME in names:
            self._study = optuna.load_study(study_name=_NAME, storage=storage)
        else:
            self._study = optuna.create_study(storage=storage, study_name=_NAME, direction=direction)
        known = len(self._study.get_trials(deepcopy=False))
        # The same seed would draw the same values once more after a restart.
        self._study.sampler = _sampler(sampler, seed + known, parallel)
        self._study.pruner = _pruner(pruner)

    def unfinished(self) -> list[AskedTrial]:
        """Returns the trials that an earlier command began and did not end."""
        found = self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        return [asked for trial in found if (asked := self._of(trial)) is not None]

    def give_up(self, asked: AskedTrial) -> None:
        """Marks a killed trial as failed and queues its values again."""
        self.ask_later(asked.values)  # first, so that a kill between the two loses no values
        self.end(asked.number, "failed")

    def ask(self) -> AskedTrial:
        """Returns the next trial; queued values come first."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a value asked again lies on the edge of its interval, say
            trial = self._study.ask(self._distributions)
        self._running[trial.number] = trial
        return AskedTrial(trial.number, {name: self._text(name, value) for name, value in trial.params.items()})

    def ask_later(self, values: Mapping[str, str]) -> None:
        """Queues values: `ask` returns them before any new ones."""
        params = {name: _number(self._distributions[name], text) for name, text in values.items()}
        self._study.enqueue_trial(params)

    def report(self, number: int, validation: int, value: float) -> bool:
        """Reports the metric at a validation, counted from 1; returns whether the trial is to end."""
        trial = self._running[number]
        if not math.isfinite(value):
            return False
        trial.report(value, validation)
        return trial.should_prune()

    def end(self, number: int, outcome: Outcome, value: float | None = None) -> None:
        """Gives the result of a trial; of a pruned one the last report counts. A result that is known stays."""
        if outcome == "complete" and value is not None:
            self._study.tell(number, value, skip_if_finished=True)
        else:
            state = TrialState.PRUNED if outcome == "pruned" else TrialState.FAIL
            self._study.tell(number, state=state, skip_if_finished=True)

    def _of(self, trial: FrozenTrial) -> AskedTrial | None:
        """Returns the trial; None if a kill came before all its values were written, so nothing was run."""
        params = trial.params
        if set(params) != set(self._space):
            self.end(trial.number, "failed")
            return None
        return AskedTrial(trial.number, {name: self._text(name, value) for name, value in params.items()})

    def _text(self, name: str, value: Any) -> str:
        axis = self._space[name]
        return str(value) if isinstance(axis, Choices) else axis.text(value)


def _distribution(axis: spaces.Axis) -> BaseDistribution:
    if isinstance(axis, Choices):
        return CategoricalDistribution(axis.values)
    if axis.step is not None:
        return IntDistribution(int(axis.low), int(axis.high), log=axis.is_log, step=axis.step)
    return FloatDistribution(axis.low, axis.high, log=axis.is_log)


def _number(distribution: BaseDistribution, text: str) -> Any:
    if isinstance(distribution, CategoricalDistribution):
        return text
    return int(text) if isinstance(distribution, IntDistribution) else float(text)


def _sampler(name: str, seed: int, parallel: int) -> optuna.samplers.BaseSampler:
    if name == "random":
        return optuna.samplers.RandomSampler(seed=seed)
    with warnings.catch_warnings():
        # constant_liar is marked experimental; it keeps trials that run at the same time apart.
        warnings.simplefilter("ignore")
        return optuna.samplers.TPESampler(seed=seed, constant_liar=parallel > 1)


def _pruner(name: str) -> optuna.pruners.BasePruner:
    if name == "median":
        return optuna.pruners.MedianPruner(n_startup_trials=_STARTUP, n_warmup_steps=_FIRST_PRUNED)
    if name == "asha":
        return optuna.pruners.SuccessiveHalvingPruner(**_ASHA)
    return optuna.pruners.NopPruner()


def _mend(path: Path) -> None:
    """Removes a last line and a lock that a kill has left.

    Raises:
        ValueError: a whole line is not one of a journal.
    """
    for left in path.parent.glob(f"{path.name}.lock*"):
        left.unlink(missing_ok=True)
    with suppress(FileNotFoundError), path.open("rb+") as stream:
        content = stream.read()
        end = content.rfind(b"\n") + 1
        for line in content[:end].splitlines():
            json.loads(line)
        stream.truncate(end)
