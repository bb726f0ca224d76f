"""What is made once for many trials, and what planning their points tells each of them."""

import multiprocessing
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.kit.composed import compose
from wellfed.config.compose import Composed
from wellfed.config.schema import RunConfig
from wellfed.contract import Datasets, LossOutput
from wellfed.observe.hardware.detect import machine
from wellfed.observe.machine_facts import MachineFacts
from wellfed.run.micro_batch import footprints
from wellfed.run.objects import assemble, loaders
from wellfed.run.objects.run_objects import RunObjects
from wellfed.run.planner import Planner
from wellfed.run.train import TRIAL
from wellfed.study.executors import trial_work as trial
from wellfed.study.executors.executor import PointPlan

STUDY = Pipe()[0]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(3, 1)

    def loss(self, batch: dict[str, Tensor]) -> LossOutput:
        return LossOutput(self.out(torch.ones(len(batch["index"]), 3)).square().mean())


class Items:
    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"index": torch.tensor(index)}


def datasets() -> Datasets:
    return Datasets(train=Items())


def composed(*overrides: str) -> Composed[RunConfig]:
    made = compose(["logger=none", "loader=baseline", "trainer.accelerator=cpu", *overrides])
    workload = replace(
        made.config.workload,
        name="w",
        effective_batch_size=4,
        model={"_target_": f"{__name__}.Model"},
        data={"_target_": f"{__name__}.datasets"},
        optimizer={"_target_": "torch.optim.SGD", "lr": 0.1},
    )
    return replace(made, config=replace(made.config, workload=workload))


# -- helpers ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def own_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a job sets for its process is put back: how processes are started, and that it is a trial."""
    monkeypatch.setenv(TRIAL, "")
    before = multiprocessing.get_start_method(allow_none=True)
    yield
    multiprocessing.set_start_method(before, force=True)


def planner(point: Composed[RunConfig], parts: RunObjects) -> Planner:
    return Planner.start(point, machine(), parts)


# -- plans ---------------------------------------------------------------------------------------------------------


def planned(points: Sequence[Composed[RunConfig]], parts: RunObjects) -> list[PointPlan]:
    """The plans as the sweep gets them."""
    named = [(str(number), each) for number, each in enumerate(points)]
    seen, *plans = pickle.loads(pickle.dumps(list(trial.planned(parts, named))))
    assert isinstance(seen, MachineFacts)
    assert all(isinstance(plan, PointPlan) for plan in plans)
    assert [plan.point for plan in plans] == [str(number) for number in range(len(points))]
    return plans


def parts_of() -> RunObjects:
    return assemble.make_objects(composed().config)


@pytest.mark.slow
def test_a_plan_tells_what_the_first_batches_are_and_builds_them_once(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_2 = ["loader.backend=torch", "loader.num_workers=2"]
    points = [
        composed(*torch_2),
        composed(*torch_2, "workload.schedule.warmup_steps=7"),
        composed("loader.num_workers=0"),
        composed(*torch_2, "loader.prefetch_factor=7"),
        composed(*torch_2, "trainer.devices=2"),
    ]
    built: list[Any] = []
    really = loaders.look_at_first_batches
    monkeypatch.setattr(loaders, "look_at_first_batches", lambda *given: built.append(given) or really(*given))
    plans = planned(points, parts_of())
    assert [plan.problem for plan in plans] == [None] * 5
    first = plans[0].first_batches
    assert first is not None
    assert (first.num_batches, first.batch_bytes) == (6, 4 * 8)
    assert plans[1].first_batches == plans[3].first_batches == plans[0].first_batches
    assert plans[2].first_batches is None  # nobody builds ahead
    assert plans[4].first_batches.batch_bytes == 2 * 8
    assert len(built) == 2


def test_a_point_that_the_model_refuses_is_invalid_and_one_that_the_machine_refuses_infeasible() -> None:
    refused, impossible = composed(), composed("gpu.precision=16-mixed")
    refused.config.workload.metrics = {"_target_": "torch.nn.ReLU"}
    plans = planned([refused, impossible], parts_of())
    assert [plan.status for plan in plans] == ["invalid", "infeasible"]
    assert "workload.metrics: can't be collected" in plans[0].problem
    assert "16-mixed needs a GPU" in plans[1].problem


@pytest.mark.slow
def test_memory_that_the_plan_has_estimated_is_not_estimated_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_process: None
) -> None:
    point, parts = composed("gpu=24gb", f"paths.cache_dir={tmp_path / 'cache'}"), parts_of()
    (plan,) = planned([point], parts)
    assert plan.predicted_peak_gib > 0
    trained: list[RunObjects] = []
    monkeypatch.setattr(trial, "train", lambda composed, parts: trained.append(parts) or 0)
    trial.run_timed(trial.SharedParts(parts, torch.get_num_threads()), STUDY, point, plan)
    monkeypatch.setattr(footprints, "measure", lambda *_: footprints.NoEstimate("measured again"))
    again = planner(point, trained[0]).for_training(0)
    assert again.predicted_peak_gib == plan.predicted_peak_gib
    assert planner(point, parts).for_training(0).predicted_peak_gib is None
