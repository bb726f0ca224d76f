"""`trainer.on_nan` and `gpu.compile` with a LightningModule of the user."""

import copy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from wellfed.train.guest import additions
from wellfed.train.guest.additions import NonFinite, compile_step
from wellfed.train.step.non_finite import NonFiniteLoss

pytestmark = pytest.mark.filterwarnings("ignore::Warning:lightning", "ignore:.*:UserWarning")


class Guest(pl.LightningModule):
    """A module whose third batch has a finite loss and a NaN gradient, or a NaN input."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.net, self.scale = nn.BatchNorm1d(3), nn.Linear(3, 1), nn.Parameter(torch.ones(()))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        root = (self.scale * batch[:, 0]).square().sum().sqrt() * 1e-3
        return self.net(self.norm(batch)).square().mean() + root

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def trained(folder: Path, third: torch.Tensor | None, action: Any) -> tuple[Guest, list[Any]]:
    torch.manual_seed(1)
    samples = [torch.randn(4, 3) for _ in range(6)]
    samples[2] = samples[2] if third is None else third
    module, events = Guest(), list[Any]()
    watching = NonFinite(action, every=1, on_event=lambda kind, **facts: events.append((kind, facts)))
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[watching],
        default_root_dir=folder,
    )
    trainer.fit(module, DataLoader(samples, batch_size=None))
    return module, events


BAD = pytest.mark.parametrize(
    "bad", [torch.tensor([[0.0, 1.0, 2.0]] * 4), torch.full((4, 3), float("nan"))], ids=["gradient", "loss"]
)


@BAD
def test_a_step_that_is_left_out_leaves_buffers(tmp_path: Path, bad: torch.Tensor) -> None:
    _, none = trained(tmp_path, None, "skip")
    module, events = trained(tmp_path, bad, "skip")
    assert (none, events) == ([], [("nan", {"step": 3, "action": "skip"})])
    assert all(bool(value.isfinite().all()) for value in module.state_dict().values())
    assert int(module.norm.num_batches_tracked) == 5


@BAD
def test_a_loss_that_is_no_number_ends_the_training(tmp_path: Path, bad: torch.Tensor) -> None:
    with pytest.raises(NonFiniteLoss, match="not a finite number in step [34]"):
        trained(tmp_path, bad, "raise")


class Adds(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.added = 1

    def training_step(self, batch: int) -> int:
        return batch + self.added


def test_a_copy_of_a_compiled_module_runs_its_own_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(additions, "Compiled", lambda step, *_: step)  # torch.compile takes seconds
    module = Adds()
    compile_step(module, "default", pytest.fail)
    other = copy.deepcopy(module)
    other.added = 10
    assert other.training_step(1) == 11
