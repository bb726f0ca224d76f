"""Finds the metric that ranks a search: from data and model of the first point that has some."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, islice
from pathlib import Path

from wellfed.config.compose import Composed
from wellfed.config.schema import RunConfig
from wellfed.errors import ConfigError
from wellfed.study.executors.fork_server import ForkServerFailed
from wellfed.study.executors.local import LocalExecutor
from wellfed.study.executors.tasks import MachineSeen, MetricSeen, shared_key
from wellfed.study.search.search_request import SearchRequest

_MOST = 5
"""Points whose data and model are made before the search gives up."""


class MetricProbes:
    """Points of a search that compose, one of each data and model.

    Args:
        compose: returns the configuration of a point, by its overrides and its folder.

    Raises:
        ConfigError: no point composes; the faults of the first.
    """

    def __init__(
        self,
        asked: SearchRequest,
        compose: Callable[[Sequence[str], Path], Composed[RunConfig]],
        *,
        is_grid: bool,
    ) -> None:
        self._asked, self._compose, self._is_grid = asked, compose, is_grid
        faults: list[ConfigError] = []
        composed = self._composed(faults)
        one = next(composed, None)
        if one is None:
            raise faults[0]
        self._probes = islice(chain([one], composed), _MOST)

    def _composed(self, faults: list[ConfigError]) -> Iterator[Composed[RunConfig]]:
        seen = set()
        for point in self._asked.grid.points() if self._is_grid else self._asked.probes():
            try:
                composed = self._compose(point.overrides, self._asked.folder / point.id)
            except ConfigError as error:
                faults.append(error)
                continue
            if (shared := shared_key(composed.config)) not in seen:
                seen.add(shared)
                yield composed

    def see(self, here: LocalExecutor) -> tuple[MachineSeen, MetricSeen]:
        """Returns the machine, and the metric that ranks.

        Raises:
            ConfigError: no data and model could be made; the fault of the first.
        """
        from wellfed.study.executors.trial_work import see_metric

        first: ConfigError | None = None
        for probe in self._probes:
            try:
                answers = here.plans.ask(probe.config, partial(see_metric, config=probe.config))
            except ForkServerFailed as failed:
                first = first or ConfigError.of("data and model", str(failed), "")
                continue
            if len(answers) != 1 or here.plans.machine is None:
                way_out = f"See the files in {self._asked.folder}."
                raise ConfigError.of("data and model", "could not be looked at.", way_out)
            metric: MetricSeen = answers[0]
            if not metric.is_validated:
                problem = "has no validation split: there is no metric to rank trainings by."
                way_out = "Return Datasets(..., val=...), or run them without comparison: hydra/sweeper=basic."
                raise ConfigError.of(f"workload={probe.config.workload.name}", problem, way_out)
            return here.plans.machine, metric
        assert first is not None
        raise first
