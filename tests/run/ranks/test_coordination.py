"""What the ranks of a run do together: the plan, data in turn, one outcome."""

import time
from dataclasses import dataclass, field, replace

import pytest
import torch

from tests.plan.test_decide import ITEMS, config, planned
from tests.run.ranks.test_exchange import joined, on_all, shared_in
from wellfed.contract import Datasets
from wellfed.errors import DataError
from wellfed.plan.run_plan import Decided, RunPlan
from wellfed.ranks import Launch
from wellfed.run.objects.run_objects import RunObjects
from wellfed.run.outcome import Outcome, RankEnded, outcome_of
from wellfed.run.ranks.coordination import OtherRanks
from wellfed.run.ranks.exchange import Exchange

BROKEN = Outcome("failed", 1, "code", "Another rank has ended: Connection closed by peer", is_of_other_rank=True)


def plan(num_workers, micro_batch):
    made = planned(config(), data=ITEMS)
    workers = Decided(num_workers, "what is free here", "predicted")
    return replace(
        made, loader=made.loader.but(num_workers=workers), memory=replace(made.memory, micro_batch=micro_batch)
    )


@dataclass(frozen=True)
class Plans:
    """A planner whose plan is at hand, for the device that it is given; it times and estimates nothing."""

    device: RunPlan
    data: Datasets = field(default_factory=lambda: Datasets([0]))

    @property
    def parts(self):
        return RunObjects(self.data, torch.nn.Linear(1, 1), None)

    def rough(self):
        return self.device

    def for_training(self, rank):
        return self.device


def test_ranks_load_and_split_a_step_as_rank_0_has_decided(exchanges, tmp_path):
    first, own = plan(2, 16), plan(8, 4)  # another rank finds more memory for workers, and less for samples

    def planned_on(exchange):
        if exchange.launch.rank == 0:
            exchange.broadcast("plan", first)
            return None
        return OtherRanks(exchange.launch.rank, shared_in(tmp_path), exchange).plan(Plans(own))

    second = on_all(joined(exchanges), planned_on)[1]
    assert second == first


def test_data_are_prepared_in_turns(launcher, tmp_path):
    """Two machines with two ranks each: a turn is over before the next begins."""
    exchanges = [Exchange(Launch("torchrun", rank, rank % 2, rank // 2, 4, 2, 2)) for rank in range(4)]
    seen = {}

    def prepare(exchange):
        rank = exchange.launch.rank
        with OtherRanks(rank, shared_in(tmp_path), exchange).in_turn():
            seen[rank] = {path.name for path in tmp_path.iterdir()}
            time.sleep(0.05)
            (tmp_path / str(rank)).touch()

    on_all(exchanges, prepare)
    for exchange in reversed(exchanges):
        exchange.close()
    assert (seen[0], seen[2]) == (set(), {"0"})
    assert {"0", "2"} <= seen[1]
    assert {"0", "2"} <= seen[3]


def test_a_rank_whose_data_can_not_be_read_is_not_waited_for(exchanges, tmp_path):
    def prepare(exchange):
        others = OtherRanks(exchange.launch.rank, shared_in(tmp_path), exchange)
        try:
            with others.in_turn():
                if exchange.launch.rank == 1:
                    raise DataError("no such file")
        except (DataError, RankEnded) as error:
            return others.outcome(outcome_of(error, has_trained=False)).message
        return "prepared"

    said = on_all(exchanges, prepare)
    assert said[0].startswith("Rank 1 on node 1 (")
    assert said[0].endswith("): no such file")
    assert said[1] == "no such file"


@pytest.fixture
def others(exchanges, tmp_path):
    """Three ranks that have met, with their part of the run."""
    return [OtherRanks(one.launch.rank, shared_in(tmp_path), one) for one in joined(exchanges)]


def test_rank_0_has_the_reason_of_the_rank_that_failed(others):
    failed = outcome_of(ValueError("no such column"), has_trained=True)
    assert others[2].outcome(failed) == failed
    assert others[1].outcome(BROKEN) == BROKEN
    found = others[0].outcome(BROKEN)
    assert found.message.startswith("Rank 2 on node 2 (")
    assert found.message.endswith("): ValueError: no such column")
    assert found.is_expected


def test_an_error_that_all_ranks_have_is_no_others(others):
    failed = outcome_of(ValueError("no such column"), has_trained=True)
    others[1].outcome(failed)
    assert others[0].outcome(failed) == failed
