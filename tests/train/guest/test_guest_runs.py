"""Arguments of Lightning's Trainer, stops, saved files and plain models of guests."""

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.kit.few import slow
from tests.kit.guests import guest, under_lightning
from tests.train.guest import brought
from wellfed import Datasets, LossOutput
from wellfed.errors import ConfigError
from wellfed.process import Stopped, StopRequest
from wellfed.train.guest.data import NoTrainerYet
from wellfed.train.step.non_finite import NonFiniteLoss

pytestmark = pytest.mark.filterwarnings("ignore::Warning:lightning", "ignore::UserWarning")
HERE = "tests.train.guest.brought"
MODULE, DATA = f"{HERE}.Module", f"{HERE}.Data"

REFUSED = [
    ("max_epochs=5", "trainer.lightning.max_epochs", "is what trainer.max_epochs sets"),
    ("devices=2", "trainer.lightning.devices", "is what trainer.devices sets"),
    ("precision=16", "trainer.lightning.precision", "is what gpu.precision sets"),
    ("inference_mod=false", "trainer.lightning.inference_mod", "Set trainer.lightning.inference_mode."),
    ("strategy=ddp_spawn", "trainer.lightning.strategy", "contradicts trainer.strategy=auto"),
]


@pytest.mark.parametrize(("typed", "where", "told"), REFUSED)
def test_an_argument_that_contradicts_a_knob_is_refused_with_both(
    tmp_path: Path, typed: str, where: str, told: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        guest(tmp_path, MODULE, DATA, f"trainer.lightning.{typed}")
    (fault,) = caught.value.faults
    assert fault.where.partition("=")[0] == where
    assert told in str(fault)


def test_two_limits_of_validation_are_refused_with_both(tmp_path: Path) -> None:
    typed = ("trainer.validate_every_steps=2", "trainer.lightning.val_check_interval=0.5")
    with pytest.raises(ConfigError, match="val_check_interval=0.5: sets the same as trainer.validate_every_steps=2"):
        guest(tmp_path, MODULE, DATA, *typed)


def test_a_callback_ends_the_training_as_under_lightning(tmp_path: Path) -> None:
    own, trainer = under_lightning(
        tmp_path, brought.Module, brought.Data, max_epochs=3, callbacks=[brought.StopsItself()]
    )
    ran = guest(tmp_path / "run", MODULE, DATA, "trainer.max_epochs=3", f"+callbacks.own._target_={HERE}.StopsItself")
    ran.fit()
    assert (ran.books.record.steps, ran.books.record.ended_by) == (trainer.global_step, "trainer.should_stop")
    assert ran.module.seen == own.seen


def test_a_timer_of_the_user_ends_the_training(tmp_path: Path) -> None:
    timer = ("+callbacks.own._target_=lightning.pytorch.callbacks.Timer", "+callbacks.own.duration={seconds: 0}")
    ran = guest(tmp_path, MODULE, DATA, "trainer.max_epochs=3", *timer).fit()
    assert ran.books.record.ended_by == "trainer.should_stop"


@pytest.mark.slow
def test_two_runs_in_one_process_are_alike(tmp_path: Path) -> None:
    ends = [guest(tmp_path / name, MODULE, DATA, "trainer.max_epochs=2").fit() for name in ("one", "two")]
    assert ends[0].module.seen == ends[1].module.seen
    assert all(torch.equal(value, ends[1].weights[name]) for name, value in ends[0].weights.items())


def test_hooks_of_the_data_are_called_as_lightning_calls_them(tmp_path: Path) -> None:
    ran = guest(tmp_path, MODULE, DATA, "trainer.max_epochs=1").fit()
    data = ran.planner.parts.guest.owner
    assert data.calls == ["prepare_data", "setup fit"]
    assert data.trainer.datamodule is data
    ran.passes.test()
    assert data.calls[2:] == ["prepare_data", "setup test"]
    assert {"train/loss", "val/loss", "test/loss"} <= ran.passes.figures.latest.keys()


@pytest.mark.parametrize("typed", [slow("loader.pin_memory=false"), "workload.effective_batch_size=8"])
def test_what_was_typed_alone_changes_a_loader(tmp_path: Path, typed: str) -> None:
    ran = guest(tmp_path, MODULE, DATA, "trainer.max_epochs=1")
    own = next(iter(ran.planner.parts.guest.given.values()))  # type: ignore[union-attr]
    assert ran.passes._changed("train", own) is own
    size = int(typed.rpartition("=")[2]) if "size" in typed else None
    ran = guest(tmp_path / "typed", MODULE, DATA, "trainer.max_epochs=1", effective_batch_size=size).fit()
    assert len(ran.module.seen[0]) == (size or 4)


class Whole(brought.Data):
    """24 rows, so that each batch has equal parts."""

    def setup(self, stage: str) -> None:
        self.rows = brought.Rows(24, draws=True)


class Dropped(brought.Data):
    """22 rows, of which each epoch drops two."""

    def train_dataloader(self) -> Any:
        return DataLoader(self.rows, 4, shuffle=True, drop_last=True)


def sets() -> Datasets:
    return Datasets(brought.Rows(24, draws=True), brought.Rows(6))


@pytest.mark.parametrize(("data", "steps"), [("Whole", 12), slow("sets", 12), slow("Dropped", 10)])
def test_parts_of_a_batch_learn_what_the_whole_does(tmp_path: Path, data: str, steps: int) -> None:
    ends = []
    for parts in (1, 2, 4):
        typed = ("trainer.max_epochs=2", f"memory.accumulate={parts}")
        more = {"effective_batch_size": 4 if data == "sets" else None}
        ran = guest(tmp_path / str(parts), f"{__name__}.NoDropout", f"{__name__}.{data}", *typed, **more).fit()
        assert ran.books.record.steps == steps
        assert ran.passes.steps_per_epoch == steps / 2
        ends.append(ran.weights)
    for other in ends[1:]:
        assert all(torch.allclose(other[name], value, rtol=1e-5, atol=1e-6) for name, value in ends[0].items())


def test_a_last_smaller_batch_is_accumulated_as_by_lightning(tmp_path: Path) -> None:
    class Halved(brought.Data):
        def train_dataloader(self) -> Any:
            return DataLoader(self.rows, 2, shuffle=True)

    own, trainer = under_lightning(tmp_path, NoDropout, Halved, max_epochs=2, accumulate_grad_batches=2)
    ran = guest(tmp_path / "run", f"{__name__}.NoDropout", DATA, "trainer.max_epochs=2", "memory.accumulate=2").fit()
    assert ran.module.seen == own.seen
    assert ran.books.record.steps == trainer.global_step == 12
    assert all(torch.equal(ran.weights[name], value) for name, value in own.state_dict().items())


class Sampled(brought.Data):
    def train_dataloader(self) -> Any:
        return DataLoader(self.rows, batch_sampler=[[0, 1], [2, 3]])


@pytest.mark.parametrize(
    ("data", "parts", "why"),
    [
        (DATA, 3, "does not cut the 4 samples of a device into equal parts"),
        (f"{__name__}.Sampled", 2, "and its batch_size is None"),
        (f"{HERE}.Iterable", 2, "Growing is no torch.utils.data.DataLoader"),
    ],
)
def test_a_loader_that_has_no_smaller_batches_is_refused(tmp_path: Path, data: str, parts: int, why: str) -> None:
    with pytest.raises(ConfigError, match=f"memory.accumulate={parts}: .*{why}"):
        guest(tmp_path, MODULE, data, "trainer.max_epochs=1", f"memory.accumulate={parts}")


class Repeats(brought.Module):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1)


@pytest.mark.slow  # refused before training, like the other arguments
def test_an_optimizer_that_needs_whole_steps_is_not_given_parts(tmp_path: Path) -> None:
    ran = guest(tmp_path, f"{__name__}.Repeats", DATA, "trainer.max_epochs=1", "memory.accumulate=2")
    with pytest.raises(ConfigError, match=r"memory.accumulate=2: LBFGS computes the gradient of a step repeatedly"):
        ran.fit()


class NoDropout(brought.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net[1] = nn.Identity()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class StopsInStep(brought.Module):
    """Gets a signal in its fourth step, as from a scheduler."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == 3:
            signal.raise_signal(signal.SIGTERM)
        return super().training_step(batch, batch_idx)


def test_a_signal_ends_the_training_after_its_step_which_is_saved(tmp_path: Path) -> None:
    ran = guest(tmp_path, f"{__name__}.StopsInStep", DATA, "trainer.max_epochs=2")
    with StopRequest().listening() as stop, pytest.raises(Stopped):
        ran.fit(stop=stop)
    content = ran.content()
    assert (content["global_step"], content["position"]["batch"]) == (4, 4)


class NoNumber(brought.Module):
    def loss(self, batch: Any) -> Tensor:
        found = super().loss(batch)
        return found * float("nan") if self.training and self.global_step == 7 else found


def test_weights_that_are_no_numbers_are_not_saved(tmp_path: Path) -> None:
    ran = guest(tmp_path, f"{__name__}.NoNumber", DATA, "trainer.max_epochs=2", "trainer.checkpoint_every_steps=1")
    with pytest.raises(NonFiniteLoss, match="None from training_step"):
        ran.fit()
    assert ran.content()["global_step"] == 7
    assert all(value.isfinite().all() for value in ran.content()["state_dict"].values())


class LosesItsLoss(brought.Module):
    """From its fourth step on, its loss is NaN, and its optimizer leaves the weights: as a gradient scaler does."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch) * (float("nan") if self.global_step >= 3 else 1.0)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.global_step >= 3:
            optimizer.zero_grad()


class LogsIt(LosesItsLoss):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss)
        return loss


@pytest.mark.parametrize("model", [slow("LosesItsLoss"), "LogsIt"])
def test_a_loss_that_is_no_number_ends_the_training(tmp_path: Path, model: str) -> None:
    ran = guest(tmp_path, f"{__name__}.{model}", DATA, "trainer.max_epochs=3", "trainer.log_every_steps=2")
    with pytest.raises(NonFiniteLoss, match="within the steps 3 to 4"):
        ran.fit()


@pytest.mark.parametrize(
    ("model", "own", "steps"), [(MODULE, [True], "1 to 2"), (f"{__name__}.LogsIt", [True, False], "3 to 4")]
)
def test_ranks_agree_on_a_loss_that_is_no_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, own: list[bool], steps: str
) -> None:
    """The first: another rank's loss is NaN. The second: this rank's is, of which the others are told."""
    told: list[bool] = []

    def agree(_: Any, decision: bool, all: bool = True) -> bool:
        told.extend([decision] if all else [])
        return len(told) < len(own) if all else decision

    monkeypatch.setattr(SingleDeviceStrategy, "reduce_boolean_decision", agree)
    with pytest.raises(NonFiniteLoss, match=f"became NaN or infinite within the steps {steps}"):
        guest(tmp_path, model, DATA, "trainer.max_epochs=3", "trainer.log_every_steps=2").fit()
    assert told == own


class Line(nn.Module):
    """A plain model; a callback of Lightning comes with it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(brought.WIDTH, 1)

    def loss(self, batch: Any) -> LossOutput:
        found = self.net(batch[1]).square().mean()
        return LossOutput(found, {"twice": 2 * found.detach()})


@pytest.mark.parametrize("data", [f"{HERE}.datasets", slow(DATA)])
def test_a_plain_model_with_a_callback_of_lightnings_is_a_guest(tmp_path: Path, data: str) -> None:
    more = {"optimizer": {"_target_": "torch.optim.SGD", "lr": 0.01}, "effective_batch_size": 4}
    own = f"+callbacks.own._target_={HERE}.StopsItself"
    ran = guest(tmp_path, f"{__name__}.Line", data, "trainer.max_epochs=2", own, **more).fit()
    ran.passes.test()
    assert ran.books.record.steps == 3
    why = "Data is a LightningDataModule" if data == DATA else "callbacks.own is a callback of Lightning"
    assert ran.planner.parts.why_guest == why
    latest = ran.passes.figures.latest
    assert latest["val/twice"] == pytest.approx(2 * latest["val/loss"])
    assert latest["test/twice"] == pytest.approx(2 * latest["test/loss"])
    assert {"model.net.weight", "model.net.bias"} == ran.content()["state_dict"].keys()


def test_arguments_of_lightning_are_none_of_a_plain_model(tmp_path: Path) -> None:
    more = {"optimizer": {"_target_": "torch.optim.SGD", "lr": 0.01}, "effective_batch_size": 4}
    with pytest.raises(ConfigError, match="Line is trained by the engine's own loop"):
        guest(tmp_path, f"{__name__}.Line", f"{HERE}.datasets", "trainer.lightning.inference_mode=true", **more)


def test_a_rank_knows_itself_before_there_is_a_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "3"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    stand_in = NoTrainerYet(num_devices=2, num_nodes=2)
    assert (stand_in.global_rank, stand_in.local_rank, stand_in.node_rank, stand_in.world_size) == (3, 1, 1, 4)
    assert not stand_in.is_global_zero


def streams() -> Datasets:
    return Datasets(brought.Numbers(), brought.Fixed())


def test_streams_without_a_loader_are_read_as_under_lightning(tmp_path: Path) -> None:
    loaders = {"train": DataLoader(brought.Numbers(), 4), "val": DataLoader(brought.Fixed(), 4)}
    own, trainer = under_lightning(tmp_path, brought.Plateau, lambda: loaders, max_epochs=3)
    ran = guest(
        tmp_path / "run", f"{HERE}.Plateau", f"{__name__}.streams", "trainer.max_epochs=3", effective_batch_size=4
    ).fit()
    assert ran.module.seen == own.seen
    for name, value in own.state_dict().items():
        assert torch.equal(ran.weights[name], value), name
    assert ran.passes.figures.latest["val/loss"] == pytest.approx(float(trainer.callback_metrics["val_loss"]))


def test_a_training_that_ends_within_an_epoch_is_validated_as_under_lightning(tmp_path: Path) -> None:
    own, trainer = under_lightning(tmp_path, brought.Module, brought.Data, max_steps=9)
    ran = guest(tmp_path / "run", MODULE, DATA, "trainer.max_steps=9", "trainer.max_epochs=null").fit()
    assert ran.module.seen == own.seen
    assert (ran.books.record.steps, ran.books.record.ended_by) == (9, "trainer.max_steps=9")
    assert ran.passes.figures.latest["val/loss"] == pytest.approx(float(trainer.callback_metrics["val_loss"]))


class LogsBoth(brought.Module):
    """Logs each figure for its batch, and as the mean of the epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), on_step=True, on_epoch=True)


@pytest.mark.slow
def test_a_mean_of_an_epoch_is_not_the_figure_of_a_batch(tmp_path: Path) -> None:
    _, trainer = under_lightning(tmp_path, LogsBoth, brought.Data, max_epochs=2)
    ran = guest(tmp_path / "run", f"{__name__}.LogsBoth", DATA, "trainer.max_epochs=2", "trainer.log_every_steps=2")
    latest = ran.fit().passes.figures.latest
    for name in ("val_loss", "val_loss_epoch", "train_loss_epoch"):
        assert latest[name.replace("_", "/", 1)] == pytest.approx(float(trainer.callback_metrics[name])), name
