from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping

from tests.kit.composed import compose
from wellfed.contract import Datasets
from wellfed.errors import ConfigError
from wellfed.run.objects.models import model_facts
from wellfed.run.objects.run_objects import RunObjects
from wellfed.run.objects.user_callbacks import check_metrics, make_callbacks
from wellfed.train.loop.callbacks import Callback


def made(*overrides: str, val: Any = ()) -> dict[str, Any]:
    model: Any = None
    parts = RunObjects(Datasets(train=[], val=val), model, None)
    return make_callbacks(compose([*overrides, "workload.schedule.name=constant"]).config, parts)


def test_several_options_go_together_and_one_may_be_left_out() -> None:
    found = made("callbacks=[early_stopping,ema,lr_monitor]", "callbacks.early_stopping.patience=7")
    assert list(found) == ["early_stopping", "ema", "lr_monitor"]
    assert [type(one).__name__ for one in found.values()] == ["EarlyStopping", "Ema", "LrMonitor"]
    assert all(isinstance(one, Callback) for one in found.values())
    assert list(made("callbacks=[early_stopping,ema]", "callbacks.ema=null")) == ["early_stopping"]
    assert made() == {}


@pytest.mark.parametrize(
    "overrides",
    [
        ["+callbacks.stats={_target_: lightning.pytorch.callbacks.DeviceStatsMonitor}"],  # one is Lightning's alone
        ["trainer.strategy=fsdp", "trainer.accelerator=gpu"],  # shards are Lightning's
        ["+callbacks.early_stopping.log_rank_zero_only=true"],  # ours has no such argument
    ],
)
def test_where_one_is_lightnings_alone_all_are_lightnings(overrides: list[str]) -> None:
    found = made("callbacks=[early_stopping,lr_monitor]", *overrides)
    assert not any(isinstance(one, Callback) for one in found.values())
    assert isinstance(found["early_stopping"], EarlyStopping)


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("callbacks.early_stopping.mode=least", "callbacks.early_stopping: .*refuses its arguments: .*least"),
        ("+callbacks.mine={_target_: torch.nn.ReLU}", "callbacks.mine: .*ReLU is no callback"),
    ],
)
def test_what_can_t_be_made_is_told(override: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        made("callbacks=early_stopping", override)


PLATEAU = "workload.schedule._target_=torch.optim.lr_scheduler.ReduceLROnPlateau"


@pytest.mark.parametrize(
    ("where", "others"),
    [("callbacks.early_stopping.monitor", ["callbacks=early_stopping"]), ("workload.schedule.monitor", [PLATEAU])],
)
def test_a_figure_of_a_split_that_is_not_there_is_told(where: str, others: list[str]) -> None:
    with pytest.raises(ConfigError, match=rf"{where}=val/loss: the workload has no val split. Set .*train/loss"):
        made(*others, f"{where}=val/loss", val=None)


@pytest.mark.parametrize(("device", "copies"), [("null", 1), ("cpu", 0)])
def test_an_average_on_the_device_is_a_part_of_its_memory(device: str, copies: int) -> None:
    found = made("callbacks=ema", f"+callbacks.ema.device={device}")
    model: Any = torch.nn.Linear(3, 2)
    config = compose(["workload.schedule.name=constant"]).config
    facts = model_facts(RunObjects(Datasets(train=[]), model, None, callbacks=found), config)
    assert facts.average_bytes == copies * 4 * (3 * 2 + 2)


def test_a_figure_that_validation_does_not_give_is_told() -> None:
    found = made("callbacks=early_stopping", "callbacks.early_stopping.monitor=val/ndcg")
    model: Any = None
    parts = RunObjects(Datasets(train=[], val=[]), model, None, callbacks=found)
    config = compose(["workload.schedule.name=constant"]).config
    expected = r"monitor=val/ndcg: validation gives no such metric. Set it to one of val/loss, val/ndcg@10"
    with pytest.raises(ConfigError, match=expected):
        check_metrics(config, parts, {"ndcg@10": 0.1, "loss": 0.2})
    check_metrics(config, parts, {"ndcg": 0.1})
