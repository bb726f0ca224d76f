"""Asks Optuna which values to try next and gives it the results: the one file that imports it.

The study is in memory. A command feeds it with the trials of the ledger.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import Trial, TrialState, create_trial

from wellfed.study.points import space as spaces
from wellfed.study.points.space import Choices, Space
from wellfed.study.row import Outcome

_STARTUP = 5
"""Trials trained to their end before the median pruner starts."""
_FIRST_PRUNED = 2
"""The first validation after which the median pruner may end a trial."""
_ASHA = {"min_resource": 1, "reduction_factor": 3}


class OptunaStudy:
    """One study of Optuna.

    Args:
        parallel: trials that run at a time.
    """

    def __init__(self, space: Space, *, mode: str, sampler: str, pruner: str, seed: int, parallel: int = 1) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._space = space
        self._distributions = {name: _distribution(axis) for name, axis in space.items()}
        self._running: dict[int, Trial] = {}
        direction: Literal["minimize", "maximize"] = "maximize" if mode == "max" else "minimize"
        self._study = optuna.create_study(
            direction=direction, sampler=_sampler(sampler, seed, parallel), pruner=_pruner(pruner)
        )

    def add(self, values: Mapping[str, str], outcome: Outcome, value: float | None, curve: Sequence[float]) -> None:
        """Adds a trial of an earlier command, with the metric at its validations."""
        state = _state(outcome, value)
        self._study.add_trial(
            create_trial(
                state=state,
                value=value if state is TrialState.COMPLETE else None,
                params=self._params(values),
                distributions=self._distributions,
                intermediate_values=dict(enumerate(curve, start=1)),
            )
        )

    def ask(self) -> tuple[int, dict[str, str]]:
        """Returns number and values (axis -> value, as typed) of the next trial; queued values come first."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a value asked again lies on the edge of its interval, say
            trial = self._study.ask(self._distributions)
        self._running[trial.number] = trial
        return trial.number, {name: self._text(name, value) for name, value in trial.params.items()}

    def ask_later(self, values: Mapping[str, str]) -> None:
        """Queues values: `ask` returns them before any new ones."""
        self._study.enqueue_trial(self._params(values))

    def report(self, number: int, validation: int, value: float) -> bool:
        """Reports the metric at a validation, counted from 1; returns whether the trial is to end."""
        trial = self._running[number]
        if not math.isfinite(value):
            return False
        trial.report(value, validation)
        return trial.should_prune()

    def end(self, number: int, outcome: Outcome, value: float | None = None) -> None:
        """Gives the result of a trial; of a pruned one the last report counts."""
        state = _state(outcome, value)
        self._study.tell(number, value if state is TrialState.COMPLETE else None, state=state)

    def _params(self, values: Mapping[str, str]) -> dict[str, Any]:
        return {name: _number(self._distributions[name], text) for name, text in values.items()}

    def _text(self, name: str, value: Any) -> str:
        axis = self._space[name]
        return str(value) if isinstance(axis, Choices) else axis.text(value)


def _state(outcome: Outcome, value: float | None) -> TrialState:
    if outcome == "complete" and value is not None:
        return TrialState.COMPLETE
    return TrialState.PRUNED if outcome == "pruned" else TrialState.FAIL


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
