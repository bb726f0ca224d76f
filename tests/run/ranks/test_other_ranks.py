"""What the ranks of a run tell each other."""

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch

from tests.plan.test_decide import ITEMS, config, planned
from tests.run.ranks.test_line import connected, lines, meeting_place  # noqa: F401
from wellfed.errors import DataError
from wellfed.plan.run_plan import Decided, PlannedStage, RunPlan
from wellfed.ranks import Launch
from wellfed.run.ending import RankEnded
from wellfed.run.outcome import outcome_of
from wellfed.run.ranks import line as module
from wellfed.run.ranks.other_ranks import OtherRanks, RankZero, leave_for_rank_0, take_from_ranks
from wellfed.train.memory.remembered import MICRO_BATCH, Lowered


def plan(num_workers, micro_batch):
    made = planned(config(), data=ITEMS)
    workers = Decided(num_workers, "what is free here", "predicted")
    loader = replace(made.loader.but(num_workers=workers), eval_workers=num_workers)
    return replace(made, loader=loader, memory=replace(made.memory, micro_batch=micro_batch))


@dataclass(frozen=True)
class Plans:
    """A planner whose plan is at hand, for the device that it is given; it times and estimates nothing."""

    device: RunPlan

    def rough(self):
        return self.device


def test_ranks_load_and_split_a_step_as_rank_0_has_decided(monkeypatch, tmp_path):
    monkeypatch.setenv("WELLFED_RANK_0", "")  # both are put back afterwards
    monkeypatch.setattr(sys, "argv", ["train.py", "--config-dir=mine", "resume=auto"])
    first = plan(2, 16)
    four = {MICRO_BATCH: Lowered(4, 8, "2026-11-22", "a")}
    stages = (PlannedStage(0, first.memory),)
    RankZero(tmp_path, 7.2, first.memory, first.loader, stages, four).tell(["seed=2", "resume=logs/run"])
    assert sys.argv == ["train.py", "--config-dir=mine", "seed=2", "resume=logs/run"]
    other = OtherRanks(1, tmp_path / "of rank 1")
    own = plan(8, 4)  # sees more room for workers, and less for samples
    second = other.plan(Plans(own), [])
    assert second.loader == first.loader
    assert (second.memory, second.memory.micro_batch) == (first.memory, 16)
    assert second.device.memory_gib == 7.2
    assert (second.stages, second.remembered) == (stages, four)
    assert second.remembered_in is None  # what has to be lowered, rank 0 keeps


def test_a_rank_that_others_started_goes_by_what_it_sees(monkeypatch):
    monkeypatch.delenv("WELLFED_RANK_0", raising=False)
    assert RankZero.told() is None


def test_data_are_prepared_in_turns(meeting_place, monkeypatch, tmp_path):  # noqa: F811
    """Two machines with two ranks each: what one does within its turn is over before the next begins."""
    monkeypatch.setattr(module, "_meet_at", lambda address, port: None)
    launches = [Launch("torchrun", rank, rank % 2, rank // 2, 4, 2, 2) for rank in range(4)]
    seen = {}

    def prepare(line):
        rank = line.launch.rank
        with OtherRanks(rank, tmp_path, line).in_turn():
            seen[rank] = {path.name for path in tmp_path.iterdir()}
            time.sleep(0.05)
            (tmp_path / str(rank)).touch()

    with connected(*launches) as made, ThreadPoolExecutor(4) as pool:
        list(pool.map(prepare, made))
    assert (seen[0], seen[2]) == (set(), {"0"})
    assert {"0", "2"} <= seen[1]
    assert {"0", "2"} <= seen[3]


def test_a_rank_whose_data_can_not_be_read_is_not_waited_for(lines, tmp_path):  # noqa: F811
    def prepare(line):
        others = OtherRanks(line.launch.rank, tmp_path, line)
        try:
            with others.in_turn():
                if line.launch.rank == 1:
                    raise DataError("no such file")
        except (DataError, RankEnded) as error:
            return others.reason(outcome_of(error, has_trained=False)).message
        return "prepared"

    with ThreadPoolExecutor(3) as pool:
        said = list(pool.map(prepare, lines))
    assert said[0].endswith("no such file")
    assert said[1] == "no such file"


def test_what_a_rank_leaves_is_taken_once(tmp_path):
    left = outcome_of(torch.OutOfMemoryError("CUDA out of memory."), has_trained=True)
    assert leave_for_rank_0(left, tmp_path, 1)
    assert take_from_ranks(tmp_path) == left
    assert take_from_ranks(tmp_path, wait_s=0) is None
    assert not leave_for_rank_0(left, tmp_path / "of another machine", 1)
