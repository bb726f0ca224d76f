"""Direct steps equal Lightning's: weights, checkpoints, and what callbacks get."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.plugins import MixedPrecision
from torch.utils.data import DataLoader, IterableDataset

from tests.kit import tiny
from tests.kit.few import few
from tests.train.lightning.test_module import SometimesNan, oom_above
from wellfed.batches import Delivery
from wellfed.data.own_loader import OwnLoader
from wellfed.observe.timing.step_clock import StepClock
from wellfed.train.lightning import trainer as lit
from wellfed.train.lightning.callbacks.clock import TimedLoader

pytestmark = pytest.mark.filterwarnings("ignore::Warning:lightning")
HOOKS = ["setup", "on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start"]
HOOKS += ["on_train_batch_end", "on_validation_start", "on_validation_batch_end", "on_validation_end"]
HOOKS += ["on_train_epoch_end", "on_save_checkpoint", "on_train_end", "on_fit_end", "teardown"]


class Direct(pl.Callback):
    """Callback that records whether the steps were direct, but for the first after a resume."""

    def __init__(self) -> None:
        self.was: list[bool] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.was.append(getattr(trainer.fit_loop.epoch_loop, "_is_direct", False))


class Stops(pl.Callback):
    """A callback that ends the run early, as EarlyStopping and Timer do."""

    def __init__(self, step: int | None) -> None:
        self._step = step

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        trainer.should_stop = trainer.should_stop or trainer.global_step == self._step


class Hears(pl.Callback):
    """A callback that records its arguments, and the state of the Trainer."""

    ignores_loss = False
    """Lightning's own loop has the loss of the last micro-batch alone."""

    def __init__(self) -> None:
        self.heard: list[tuple[Any, ...]] = []


def note(self: Hears, hook: str, trainer: Any, module: Any, *more: Any) -> None:
    state = trainer.global_step, trainer.current_epoch, trainer.is_last_batch, trainer.training
    if hook.startswith("on_train_batch"):
        loss = [] if isinstance(more[0], Delivery) or self.ignores_loss else [more[0]["loss"].item()]
        more = (*loss, more[-1])
        state = *state, trainer.optimizers[0].param_groups[0]["lr"], module._current_fx_name
    else:
        more = ()
    self.heard.append((hook, *state, *more))


for hook in HOOKS:
    setattr(Hears, hook, lambda self, *more, hook=hook, **_: note(self, hook, *more))


def fitted(
    module: Any, tmp_path: Path, callbacks: Any = (), *, direct: bool, plugins: Any = None, val: Any = None, **more: Any
) -> Any:
    """Trains with direct steps or with Lightning's own loop; returns the Trainer."""
    checkpoint = more.pop("checkpoint", None)
    watch = Direct()
    more = tiny.options(**more)
    trainer = lit.make_trainer(
        replace(more, precision=None) if plugins else more, [*callbacks, watch], tmp_path, plugins=plugins
    )
    if not direct:
        trainer.fit_loop.epoch_loop = _TrainingEpochLoop(trainer, None, trainer.fit_loop.epoch_loop.max_steps)
    lit.fit(trainer, module, tiny.loader(), val, checkpoint)
    assert not watch.was or set(watch.was) == {direct}
    return trainer


def three(
    tmp_path: Path, make: Any = tiny.module, stops: int | None = None, plugin: Any = lambda: None, **changes: Any
) -> list[tuple[torch.Tensor, dict[str, Any], Any]]:
    """Returns weights, checkpoint and records of direct steps, of ours in Lightning's loop, and of Lightning's own."""
    results = []
    for number in range(3):
        hears, module = Hears(), make() if number < 2 else tiny.Lightnings(make())
        callbacks, val = [hears, Stops(stops)], tiny.eval_loader(8)
        plugins = [plugin()] if plugin() else None
        trainer = fitted(module, tmp_path, callbacks, direct=number == 0, plugins=plugins, val=val, **changes)
        path = tmp_path / f"{number}.ckpt"
        trainer.save_checkpoint(path)
        kept = torch.load(path, weights_only=True)
        own = ("totals", "position", "micro_batch")
        results.append((tiny.weights(module), {k: kept[k] for k in kept if k not in own}, hears.heard))
    return results


def flat(state: Any, name: str = "") -> dict[str, Any]:
    """Returns the leaves of a checkpoint by their path."""
    if isinstance(state, dict):
        return {path: leaf for key, item in state.items() for path, leaf in flat(item, f"{name}/{key}").items()}
    if isinstance(state, (list, tuple)):
        return flat(dict(enumerate(state)), name)
    return {name: state.tolist() if isinstance(state, torch.Tensor) else state}


def scaled() -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=2.0**12))


def of_precisions() -> Iterator[Any]:
    """Yields each precision with and without clipping, and with and without micro-batches; other pairs are slow."""
    for number, precision in enumerate(["32-true", "bf16-mixed", "bf16-true", "16-mixed"]):
        for clip in (None, 0.05):
            for micro in (32, 8):
                is_first = (clip is None) == (micro == (32, 8)[number % 2])
                yield pytest.param(precision, clip, micro, marks=() if is_first else pytest.mark.slow)


@pytest.mark.parametrize(("precision", "clip", "micro"), few([*of_precisions()], 4))
def test_a_run_is_lightnings_bit_for_bit(
    tmp_path: Path, precision: str, clip: float | None, micro: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Hears, "ignores_loss", micro < 32)
    changes = {"gradient_clip": clip, "max_steps": 11, "validate_every_steps": 4}
    changes |= {"plugin": scaled} if precision == "16-mixed" else {"precision": precision}
    ours, *others = three(tmp_path, lambda: tiny.module(micro=micro, dropout=0.2), **changes)
    for other in others:
        assert torch.equal(ours[0], other[0])
        assert flat({**ours[1], "trained": None}) == flat({**other[1], "trained": None})
        assert ours[2] == other[2]
    assert {told[0] for told in ours[2]} >= set(HOOKS) - {"on_save_checkpoint"}


@pytest.mark.parametrize(
    "changes",
    [{"max_epochs": 2, "max_steps": None}, {"max_epochs": 3, "max_steps": 7}, {"max_steps": 20, "stops": 5}],
)
def test_a_run_ends_where_lightnings_ends(tmp_path: Path, changes: dict[str, Any]) -> None:
    ours, *others = three(tmp_path, **changes)
    for other in others:
        assert flat({**ours[1], "trained": None}) == flat({**other[1], "trained": None})
        assert ours[2] == other[2]


def test_out_of_memory_and_steps_that_are_no_number_are_the_same(tmp_path: Path) -> None:
    for make in (
        lambda: tiny.module(dropout=0.3, fail=oom_above(8)),
        lambda: tiny.module(model=SometimesNan(), on_nan="skip"),
    ):
        found = []
        for direct in (True, False):
            torch.manual_seed(3)
            module = make()
            trainer = fitted(module, tmp_path, direct=direct, max_steps=8, gradient_clip=0.5)
            trainer.save_checkpoint(tmp_path / "end.ckpt")
            found.append((tiny.weights(module), flat(torch.load(tmp_path / "end.ckpt", weights_only=True))))
        assert torch.equal(found[0][0], found[1][0])
        assert found[0][1] == found[1][1]


@pytest.mark.parametrize(("first", "then"), [(True, False), (False, True), (True, True)])
def test_a_checkpoint_goes_on_with_the_other_kind_of_step(tmp_path: Path, first: bool, then: bool) -> None:
    whole, rest = tiny.module(dropout=0.2), tiny.module(dropout=0.2)
    fitted(whole, tmp_path, direct=False, max_steps=9)
    for stop in (2, 3, 4):  # in the middle, at the end and at the start of an epoch
        part = tiny.module(dropout=0.2)
        kept = tiny.checkpoints(tmp_path / str(stop))
        fitted(part, tmp_path, [kept], direct=first, max_steps=stop)
        trainer = fitted(rest, tmp_path, direct=then, checkpoint=kept.folder / "last.ckpt", max_steps=9)
        assert trainer.global_step == 9
        assert torch.equal(tiny.weights(whole), tiny.weights(rest))


class FollowsValidation(tiny.Lightnings):
    """A LightningModule whose rate follows each validation, every second step."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=9.0)
        config = {"scheduler": plateau, "interval": "step", "frequency": 2, "monitor": "val_loss"}
        return {"optimizer": optimizer, "lr_scheduler": config}

    def validation_step(self, delivery: Any, batch_idx: int) -> None:
        self.log("val_loss", self.model.loss(delivery.batch).loss, batch_size=delivery.size)


@pytest.mark.parametrize("step", [2, 6])
def test_a_resume_after_a_validation_ends_no_step_again(tmp_path: Path, step: int) -> None:
    """A plateau scheduler would step without its metric, and loggers would count one batch more."""

    def fit(steps: int, checkpoint: Path | None) -> Any:
        module = FollowsValidation(tiny.module())
        trainer = lit.make_trainer(tiny.options(max_steps=steps, validate_every_steps=2), [], tmp_path)
        lit.fit(trainer, module, tiny.loader(), tiny.eval_loader(), checkpoint)
        assert trainer.fit_loop.epoch_loop._batches_that_stepped == steps
        return trainer

    fit(step, None).save_checkpoint(tmp_path / "some.ckpt")
    resumed, whole = fit(8, tmp_path / "some.ckpt"), fit(8, None)
    assert torch.equal(tiny.weights(resumed.lightning_module), tiny.weights(whole.lightning_module))


def test_what_a_callback_logs_is_kept(tmp_path: Path) -> None:
    class Logs(pl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            module.log("at_start", float(batch_idx), batch_size=1)

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            module.log("at_end", outputs["loss"], on_step=True, on_epoch=True, batch_size=1)

    logged = []
    for direct in (True, False):
        trainer = fitted(tiny.module(), tmp_path, [Logs()], direct=direct, max_steps=7)
        logged.append({name: value.item() for name, value in trainer.callback_metrics.items()})
    assert logged[0] == logged[1]
    assert set(logged[0]) == {"at_start", "at_end", "at_end_step", "at_end_epoch"}


class InOrder(IterableDataset[Any]):
    """A stream of the samples of `tiny.TinyData`, of unknown length."""

    def __iter__(self) -> Any:
        data = tiny.TinyData()
        return (data[index] for index in range(tiny.NUM_SAMPLES))


class OneByOne(tiny.TinyData):
    """The same data with an index."""

    fetch: Any = None


def over_stream(folder: Path, batches: Any, *, epochs: int, checkpoint: Path | None = None) -> Any:
    """Trains some epochs; returns weights, records, and a checkpoint after each step."""
    hears, module = Hears(), tiny.module(dropout=0.2)
    folder.mkdir()

    class Saves(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            trainer.save_checkpoint(folder / f"{trainer.global_step}.ckpt")

    trainer = lit.make_trainer(tiny.options(max_epochs=epochs, max_steps=None), [hears, Saves()], folder)
    lit.fit(trainer, module, TimedLoader(batches, StepClock()), tiny.eval_loader(8), checkpoint)
    return tiny.weights(module), [told for told in hears.heard if told[0] != "on_save_checkpoint"]


def test_epochs_of_a_stream_end_as_those_of_known_length_and_are_gone_on_with(tmp_path: Path) -> None:
    """Validations come at the ends of epochs; a checkpoint of any step resumes with the next."""
    known = OwnLoader(DataLoader(OneByOne(), 32))
    expected = over_stream(tmp_path / "known", known, epochs=2)
    found = over_stream(tmp_path / "stream", OwnLoader(DataLoader(InOrder(), 32)), epochs=2)
    assert found[0].equal(expected[0])
    assert found[1] == expected[1]
    assert {told[0] for told in found[1]} >= {"on_validation_end", "on_train_epoch_end"}
    for step in range(1, 7):
        made = OwnLoader(DataLoader(InOrder(), 32))
        again = over_stream(tmp_path / f"{step}", made, epochs=2, checkpoint=tmp_path / "stream" / f"{step}.ckpt")
        assert again[0].equal(expected[0]), step
