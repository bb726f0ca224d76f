"""Trials that other machines run: what is ordered, and what is made of their ends."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import DictConfig

from wellfed.config.compose import Composed
from wellfed.config.schema import Accelerator, RunConfig
from wellfed.process import StopRequest
from wellfed.record import RunRecord
from wellfed.study.clusters.cluster import ClusterLost, Ended, Order
from wellfed.study.clusters.keeper import OrderEnd, ProcessSettings
from wellfed.study.points.grid import GridPoint
from wellfed.study.row import Row
from wellfed.study.trial_end import started_at
from wellfed.study.trials import elsewhere
from wellfed.study.trials.elsewhere import TrialsElsewhere
from wellfed.study.trials.node_orders import TrialOrder
from wellfed.study.trials.tasks import RunPoint

LOST = OrderEnd("node7", None, "its worker process was killed")


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """A sweep with the record of a trial that ran out of memory."""
    folder = tmp_path / "p"
    folder.mkdir()
    made = RunRecord.start("p")
    made.status, made.exit_code, made.started_at = "oom", 3, "2026-01-01T00:00:00+00:00"
    made.write(folder)
    return tmp_path


def lost(sweep: Path, before: str | None) -> Row:
    return elsewhere.row_of_order(Row("p", "trial", (), "failed", 2, folder="p"), before, LOST, 1.5, sweep, "sweep")


def test_a_trial_that_is_lost_before_it_begins_leaves_the_earlier_attempt_as_it_is(earlier: Path) -> None:
    content = (earlier / "p" / "run.json").read_bytes()
    row = lost(earlier, started_at(earlier / "p"))
    assert (row.status, row.folder, row.host, row.seconds, row.attempt) == ("killed", "", "node7", 1.5, 2)
    assert row.error is not None
    assert row.error["message"] == LOST.problem
    assert (earlier / "p" / "run.json").read_bytes() == content


def test_a_trial_that_is_lost_while_it_runs_is_so_in_its_own_record(earlier: Path) -> None:
    row = lost(earlier, "2025-12-31T00:00:00+00:00")
    assert (row.status, row.folder, row.started_at) == ("killed", "p", "2026-01-01T00:00:00+00:00")
    assert json.loads((earlier / "p" / "run.json").read_text())["status"] == "killed"


def test_a_trial_that_is_lost_before_there_was_a_folder_has_none(tmp_path: Path) -> None:
    row = lost(tmp_path, None)
    assert (row.status, row.folder) == ("killed", "")


class Machines:
    """Do each order at once: the row comes back as ok, of the point ``unfit`` nothing, and at ``lost`` all are gone."""

    def __init__(self, most_gpus: int | None) -> None:
        self.most_gpus, self.orders, self.is_alone = most_gpus, [], None

    def open(self, settings: ProcessSettings, say: Callable[[str], None]) -> None:
        self.settings = settings

    def run(self, orders: Sequence[Order], *, alone: bool) -> Iterator[Ended | None]:
        self.orders, self.is_alone = list(orders), alone
        for order in orders:
            yield None
            if order.key == "lost":
                raise ClusterLost("All machines are gone.")
            row = replace(pickle.loads(order.content).row, status="ok", host="node7")
            is_unfit = order.key == "unfit"
            told = OrderEnd("node7", None if is_unfit else pickle.dumps(row), "other code", is_unfit)
            yield Ended(order.key, told, 1.0)

    def start_no_more(self) -> None:
        """All are done at once."""

    def close(self) -> None:
        """Nothing stays."""


def trial(point: str, *, devices: int = 1, accelerator: str = "auto", gpu: str = "auto") -> TrialOrder:
    config = RunConfig()
    config.trainer.devices, config.trainer.accelerator = devices, Accelerator(accelerator)
    composed = Composed(config, {}, {"gpu": gpu}, (), frozenset(), None, DictConfig({}), DictConfig({}))
    return TrialOrder(RunPoint(GridPoint(point, {}, ()), composed), Row(point, "trial", (), "failed", 1, folder=point))


def test_each_row_comes_back_and_what_is_unfit_or_lost_has_none(tmp_path: Path) -> None:
    said: list[str] = []
    machines = Machines(most_gpus=0)
    trials = TrialsElsewhere(machines, tmp_path, StopRequest(), said.append, lambda: None)
    ended = {order.row.point: row for order, row in trials.run([trial(key) for key in ("a", "unfit", "lost", "b")])}
    assert {key: row and (row.status, row.host) for key, row in ended.items()} == {"a": ("ok", "node7"), "unfit": None}
    assert trials.is_lost
    assert said == ["Not run: node7: other code", "All machines are gone. The same command again runs what is missing."]


@pytest.mark.parametrize(
    ("most_gpus", "asked", "num_gpus", "fits"),
    [
        (4, {"devices": 2}, 2, True),
        (1, {"devices": 2}, 2, False),
        (4, {"devices": 2, "accelerator": "cpu"}, 0, True),
        (4, {"gpu": "cpu"}, 0, True),
        (0, {"devices": 2}, 0, True),  # its plan says what is wrong
        (None, {"devices": 2}, 0, True),
        (None, {"devices": 2, "accelerator": "gpu"}, 2, True),
    ],
)
def test_a_trial_is_ordered_with_the_gpus_that_it_asks_for(
    tmp_path: Path, most_gpus: int | None, asked: dict[str, object], num_gpus: int, fits: bool
) -> None:
    machines = Machines(most_gpus)
    trials = TrialsElsewhere(machines, tmp_path, StopRequest(), print, lambda: None)
    order = trial("a", **asked)
    assert (trials.misfit(order.point.composed) is None) == fits
    list(trials.run([order]))
    assert [each.num_gpus for each in machines.orders] == [num_gpus]


def test_where_machines_are_named_there_is_one_at_a_time_on_each(tmp_path: Path) -> None:
    machines = Machines(0)
    trials = TrialsElsewhere(machines, tmp_path, StopRequest(), print, lambda: None)
    list(trials.run([trial("a"), trial("b")], {"a": frozenset(["node7"]), "b": None}))
    assert ([each.hosts for each in machines.orders], machines.is_alone) == ([frozenset(["node7"]), None], True)
    list(trials.run([trial("a")]))
    assert machines.is_alone is False
