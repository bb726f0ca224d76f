"""Asks Optuna which values to try next and gives it the results: the one file that imports it.

Optuna's study is in memory. Each command feeds it with the trials of the search's folder.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from itertools import count
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import Trial, TrialState, create_trial

from wellfed.config.schema import SearchConfig
from wellfed.study.points.grid import GridPoint, point_of
from wellfed.study.points.space import Axis, Choices, Space, size
from wellfed.study.rows import Kept, Row, read_curve
from wellfed.study.search.points import Points, Proposal

_MOST_REPEATS = 200
"""Known points that Optuna may ask for in a row before the space counts as tried."""
_STARTUP = 5
"""Trials trained to their end before the median pruner starts."""
_FIRST_PRUNED = 2
"""The first validation after which the median pruner may end a trial."""
_ASHA = {"min_resource": 1, "reduction_factor": 3}


class AskedPoints(Points):
    """Points that Optuna asks for, each once; at most ``max_trials``, those of the folder included.

    Args:
        space: knobs and groups that vary.
        fixed: overrides that all trials share.
        mode: ``max`` or ``min``: which values of the metric are better.
        parallel: trials that run at a time.
    """

    def __init__(
        self, space: Space, fixed: Sequence[str], kept: Kept, options: SearchConfig, mode: str, *, parallel: int = 1
    ) -> None:
        self._space, self._fixed, self._kept, self._options = space, tuple(fixed), kept, options
        self._running: dict[str, Trial] = {}
        """Id of each point that runs -> its trial in Optuna's study."""
        self._is_tried = False
        """Whether Optuna asks for known points only."""
        self._again: set[str] = set()
        """Points that have a row and are run once more; their values wait in Optuna's queue."""
        rows = kept.found.rows
        self._numbers = count(max((row.trial for row in rows if row.trial is not None), default=-1) + 1)
        self._distributions = {name: _distribution(axis) for name, axis in space.items()}
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        seed = options.seed + len(rows)  # the same seed would draw the same values again
        self._study = optuna.create_study(
            direction="maximize" if mode == "max" else "minimize",
            sampler=_sampler(options.sampler.value, seed, parallel),
            pruner=_pruner(options.pruner.value),
        )
        for lost in kept.found.unfinished:
            self._study.enqueue_trial(self._params(lost.overrides))
        for row in rows:
            self._feed(row)
        for row in kept.latest.values():
            if row.status in {"interrupted", *kept.retry}:
                self._again.add(row.point)
                self._study.enqueue_trial(self._params(row.overrides))

    def _feed(self, row: Row) -> None:
        """Adds a trial of an earlier command, with the metric at its validations."""
        metric, state = self._kept.metric, _state(row)
        curve = read_curve(self._kept.folder / row.folder, metric.name) if metric is not None and row.folder else ()
        finite = [point.value for point in curve if math.isfinite(point.value)]
        self._study.add_trial(
            create_trial(
                state=state,
                value=row.value if state is TrialState.COMPLETE else None,
                params=self._params(row.overrides),
                distributions=self._distributions,
                intermediate_values=dict(enumerate(finite, start=1)),
            )
        )

    def _params(self, overrides: Sequence[str]) -> dict[str, Any]:
        typed = dict(text.partition("=")[::2] for text in overrides)
        return {name: _number(each, typed[name]) for name, each in self._distributions.items() if name in typed}

    @property
    def has_more(self) -> bool:
        """Whether points are to be run again, or new ones are allowed and left."""
        number, points = len(self._kept.latest.keys() | self._running.keys()), size(self._space)
        most = self._options.max_trials
        return bool(self._again) or (number < min(most, points or most) and not self._is_tried)

    def next(self) -> Proposal | None:
        """Returns an untried point; a point that Optuna asks for twice is answered with its row."""
        if not self.has_more:
            return None
        for _ in range(_MOST_REPEATS):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a value asked again lies on the edge of its interval, say
                asked = self._study.ask(self._distributions)
            point = point_of({name: self._text(name, value) for name, value in asked.params.items()}, self._fixed)
            row = self._kept.latest.get(point.id)
            if point.id not in self._running and (row is None or point.id in self._again):
                self._again.discard(point.id)
                self._running[point.id] = asked
                return next(self._numbers), point
            self._end(asked, row)
        self._is_tried = True
        return None

    def _text(self, name: str, value: Any) -> str:
        axis = self._space[name]
        return str(value) if isinstance(axis, Choices) else axis.text(value)

    def prune(self, point: GridPoint, validation: int, value: float) -> str | None:
        """Returns the pruner's reason to end a trial."""
        trial = self._running[point.id]
        if not math.isfinite(value):
            return None
        trial.report(value, validation)
        return f"search.pruner={self._options.pruner} after validation {validation}" if trial.should_prune() else None

    def ended(self, row: Row) -> None:
        """Gives Optuna the result; of a pruned trial the last report counts."""
        self._end(self._running.pop(row.point), row)

    def _end(self, asked: Trial, row: Row | None) -> None:
        state = _state(row)
        value = row.value if row is not None and state is TrialState.COMPLETE else None
        self._study.tell(asked.number, value, state=state)


def _state(row: Row | None) -> TrialState:
    if row is not None and row.outcome == "complete" and row.value is not None:
        return TrialState.COMPLETE
    return TrialState.PRUNED if row is not None and row.outcome == "pruned" else TrialState.FAIL


def _distribution(axis: Axis) -> BaseDistribution:
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
