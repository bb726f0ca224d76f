"""What people bring trains here as under Lightning's own Trainer: the same steps, the same order, the same weights."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kit.few import slow
from tests.kit.guests import guest, under_lightning
from tests.train.guest import brought

pytestmark = pytest.mark.filterwarnings("ignore::Warning:lightning", "ignore::UserWarning")
HERE = "tests.train.guest.brought"
EACH = {"reload_dataloaders_every_n_epochs": 1}
ROWS = [
    pytest.param("Module", "Data", {}, id="a DataModule whose samples draw"),
    slow("Module", "SplitInSetup", {}, id="setup that draws"),
    pytest.param("Module", "NeedsTrainer", {}, id="setup that needs the trainer"),
    slow("Module", "LateNeedsTrainer", {}, id="setup that draws, and then needs the trainer"),
    pytest.param("Module", "AsksForTrainer", {}, id="setup that asks for the trainer and takes a default"),
    slow("Module", "DrawsInHook", {}, id="train_dataloader that draws from a generator of its own"),
    slow("Module", "Workers", {}, id="workers"),
    pytest.param("Module", "Weighted", {}, id="a sampler with a generator of its own"),
    slow("Module", "OtherLength", EACH, id="a loader of another length in each epoch"),
    slow("Module", "Data", EACH, id="reload_dataloaders_every_n_epochs"),
    pytest.param("Module", "Stream", {}, id="an IterableDataset"),
    slow("Module", "Iterable", {}, id="any iterable, of another length in each epoch"),
    pytest.param("OfPairs", "Combined", {}, id="CombinedLoader"),
    pytest.param("OfTwoVal", "TwoVal", {}, id="two loaders of validation, a plateau of one"),
    slow("SetsLevel", "Data", {}, id="a hook that sets an epoch on the data set"),
    slow("EndsEpochs", "Data", {}, id="-1 from a hook"),
    slow("SkipsSteps", "Data", {}, id="a step that gives None"),
    pytest.param("OwnLoaders", None, {}, id="a batch that is None, loaders in the module"),
    slow("GrowsInSetup", "Data", {}, id="layers sized in setup"),
    pytest.param("ReplacesOptimizer", "Data", {}, id="an optimizer that is replaced"),
    slow("EstimatesSteps", "Data", {}, id="estimated_stepping_batches"),
    pytest.param("Manual", "Data", {}, id="manual optimization"),
    slow("HandlesNan", "Data", {}, id="a loss of NaN that the module handles"),
    slow("Module", "Data", {"val_check_interval": 0.5}, id="val_check_interval"),
]


@pytest.mark.parametrize(("model", "data", "arguments"), ROWS)
def test_it_learns_the_same(tmp_path: Path, model: str, data: str | None, arguments: dict[str, Any]) -> None:
    typed = [f"trainer.lightning.{name}={value}" for name, value in arguments.items()]
    make = None if data is None else getattr(brought, data)
    own, trainer = under_lightning(tmp_path, getattr(brought, model), make, max_epochs=3, **arguments)
    ran = guest(tmp_path / "run", f"{HERE}.{model}", data and f"{HERE}.{data}", "trainer.max_epochs=3", *typed).fit()
    assert ran.module.seen == own.seen
    assert ran.books.record.steps == trainer.global_step
    for name, value in own.state_dict().items():
        assert torch.equal(ran.weights[name], value), name
    latest = {name.replace("/", "_", 1): value for name, value in ran.passes.figures.latest.items()}
    for name, value in trainer.callback_metrics.items():
        assert latest[name] == pytest.approx(float(value), rel=1e-6), name
