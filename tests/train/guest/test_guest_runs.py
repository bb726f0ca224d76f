"""Arguments of Lightning's Trainer, stops, saved files and plain models of guests."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.kit.few import slow
from tests.kit.guests import guest, under_lightning
from tests.train.guest import brought
from wellfed import Datasets, LossOutput
from wellfed.errors import ConfigError, WellfedError
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
    ("max_epoch=5", "trainer.lightning.max_epoch", "Set trainer.max_epochs."),
    ("strategy=ddp_spawn", "trainer.lightning.strategy", "is what trainer.strategy sets"),
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
    with pytest.raises(ConfigError, match="val_check_interval=0.5: is what trainer.validate_every_steps sets"):
        guest(tmp_path, MODULE, DATA, *typed)


def test_a_callback_ends_the_training_as_under_lightning(tmp_path: Path) -> None:
    own, trainer = under_lightning(
        tmp_path, brought.Module, brought.Data, max_epochs=3, callbacks=[brought.StopsItself()]
    )
    ran = guest(tmp_path / "run", MODULE, DATA, "trainer.max_epochs=3", f"+callbacks.own._target_={HERE}.StopsItself")
    ran.fit()
    assert (ran.books.record.steps, ran.books.record.ended_by) == (trainer.global_step, "trainer.should_stop")
    assert ran.module.seen == own.seen


def test_a_monitor_has_the_name_that_the_module_logs(tmp_path: Path) -> None:
    early = ("trainer.max_epochs=2", "callbacks=early_stopping")
    with pytest.raises(WellfedError, match="val/loss.* which is not available.*val_loss"):
        guest(tmp_path / "other", MODULE, DATA, *early).fit()
    ran = guest(tmp_path / "own", MODULE, DATA, *early, "callbacks.early_stopping.monitor=val_loss").fit()
    assert ran.passes._checkpoints.best_metric == "loss"
    assert ran.content("best.ckpt")["global_step"] in {6, 12}


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


@pytest.mark.parametrize(
    ("model", "own", "steps"),
    [(MODULE, [True], "1 to 2"), (f"{__name__}.NoNumber", [True] * 5 + [False], "7 to 8")],
)
def test_ranks_agree_on_weights_that_are_no_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, own: list[bool], steps: str
) -> None:
    """The first: another rank's weights are NaN. The second: this rank's are, of which the others are told."""
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


class LooksAround(brought.Module):
    """Notes what a test knows of the training, and where the checkpoints are."""

    def on_train_end(self) -> None:
        callback: Any = self.trainer.checkpoint_callback
        self.files = [callback.best_model_path, callback.last_model_path]
        self.score = float(callback.best_model_score or 0.0)

    def on_test_start(self) -> None:
        self.tested = (self.current_epoch, self.global_step)
        self.tested_weights = [weight.detach().clone() for weight in self.parameters()]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.log("val_other", float(-self.current_epoch % 3))  # best in the second epoch


def test_a_test_knows_its_training_and_the_weights_that_a_checkpoint_picks(tmp_path: Path) -> None:
    saves = ModelCheckpoint(tmp_path, monitor="val_other", mode="max")
    stops = EarlyStopping("val_loss", patience=99)
    given: dict[str, Any] = {"callbacks": [saves, stops], "enable_checkpointing": True}
    own, trainer = under_lightning(tmp_path, LooksAround, brought.Data, max_epochs=3, **given)
    trainer.test(own, datamodule=brought.Data(), ckpt_path=saves.best_model_path)
    stop = "{_target_: lightning.pytorch.callbacks.EarlyStopping, monitor: val_loss, patience: 99}"
    keep = "{_target_: lightning.pytorch.callbacks.ModelCheckpoint, monitor: val_other, mode: max}"
    typed = ("trainer.max_epochs=3", f"+callbacks.stops={stop}", f"+callbacks.keeps={keep}")
    ran = guest(tmp_path / "run", f"{__name__}.LooksAround", DATA, *typed).fit()
    ran.passes.test()
    assert ran.module.tested == own.tested == (3, 18)
    for mine, theirs in zip(ran.module.tested_weights, own.tested_weights, strict=True):
        assert torch.equal(mine, theirs)


def test_the_files_of_a_run_are_those_of_its_checkpoint_callback(tmp_path: Path) -> None:
    typed = ("trainer.max_epochs=3", "trainer.best_metric=val_other", "trainer.best_mode=max")
    ran = guest(tmp_path, f"{__name__}.LooksAround", DATA, *typed).fit()
    assert ran.module.files == [str(ran.last.with_name(name)) for name in ("best.ckpt", "last.ckpt")]
    assert all(map(os.path.exists, ran.module.files))
    assert ran.module.score == ran.content("best.ckpt")["best"]["other"]


class LeavesOut(brought.Module):
    """Saves no frozen weights, as those of a large encoder that is read elsewhere."""

    strict_loading = False  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(2, 2).requires_grad_(False)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        for name in ("frozen.weight", "frozen.bias"):
            del checkpoint["state_dict"][name]


def test_weights_that_a_module_leaves_out_are_not_missed(tmp_path: Path) -> None:
    names = (f"{__name__}.LeavesOut", DATA, "trainer.max_epochs=1")
    ran = guest(tmp_path, *names).fit()
    ran.passes.check_fits("resume", ran.content())
    weights = ran.content()["state_dict"]
    weights["net.0.bias"] = weights["net.0.bias"][:-1]
    with pytest.raises(ConfigError, match=r"net.0.bias: \(3,\) there, \(4,\) here"):
        ran.passes.check_fits("resume", {"state_dict": weights})


class NoOthers(brought.Data):
    def val_dataloader(self) -> Any:
        return None

    test_dataloader = val_dataloader


def test_none_is_no_loader(tmp_path: Path) -> None:
    ran = guest(tmp_path, MODULE, f"{__name__}.NoOthers", "trainer.max_epochs=1").fit()
    ran.passes.test()
    assert ran.books.record.steps == 6


class Empty(brought.Data):
    def train_dataloader(self) -> Any:
        return DataLoader([], 4)  # type: ignore[arg-type]


class NoTraining(brought.Data):
    def train_dataloader(self) -> Any:
        return None


class Two(brought.Module):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), 0.1) for _ in range(2)]


@pytest.mark.parametrize(
    ("model", "data", "typed", "told"),
    [
        (MODULE, f"{__name__}.Empty", None, "workload.data: an epoch of training has no batch"),
        (MODULE, f"{__name__}.NoTraining", None, "`NoTraining.train_dataloader\\(\\)`. Found None"),
        (f"{__name__}.Two", DATA, None, "multiple optimizers is only supported with manual"),
        (MODULE, DATA, "limit_train_batches=two", "trainer.lightning: .*refuses {'limit_train_batches': 'two'}"),
        (MODULE, DATA, "limit_train_batches=1.5", "trainer.lightning: .*invalid value 1.5"),
        (MODULE, DATA, "plugins=[a]", "trainer.lightning: .*invalid type for plugin a"),
        (MODULE, DATA, "val_check_interval=1000", r"`val_check_interval` \(1000\) must be less"),
    ],
)
def test_a_mistake_is_told_in_a_sentence(tmp_path: Path, model: str, data: str, typed: str | None, told: str) -> None:
    more = [] if typed is None else [f"trainer.lightning.{typed}"]
    with pytest.raises(WellfedError, match=told):
        guest(tmp_path, model, data, "trainer.max_epochs=1", *more).fit()
