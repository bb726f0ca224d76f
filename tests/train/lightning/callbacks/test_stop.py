import os
import signal
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging

from tests.kit import tiny
from tests.kit.few import few
from wellfed.contract import LossOutput
from wellfed.errors import DataError
from wellfed.observe.timing.step_clock import StepClock
from wellfed.process import Stopped, StopRequest
from wellfed.train.lightning import trainer as lit
from wellfed.train.lightning.callbacks.clock import TimedLoader
from wellfed.train.lightning.callbacks.figures import Figures
from wellfed.train.lightning.callbacks.stop import StopAtStepEnd
from wellfed.train.lightning.checkpoints.checkpoints import BeforeUsers, CheckpointOptions, Checkpoints
from wellfed.train.lightning.user_module.additions import make_user_trainer
from wellfed.train.plain_model.scheduling import Scheduling

pytestmark = pytest.mark.filterwarnings("ignore::Warning:lightning")


class SignalAt(pl.Callback):
    """A callback that sends this process a signal in the middle of a step."""

    def __init__(self, step: int, *signums: int) -> None:
        self._step, self._signums = step, signums

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        def send(*_: Any) -> None:
            if trainer.global_step == self._step:
                for signum in self._signums:
                    os.kill(os.getpid(), signum)

        module.model.register_forward_hook(send)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_after_its_step_with_a_checkpoint(tmp_path: Path, signum: int) -> None:
    request, stopped_at = StopRequest(), []
    at_end = StopAtStepEnd(request, lambda trainer: stopped_at.append(trainer.global_step))
    with request.listening(), pytest.raises(Stopped) as caught:
        tiny.fit(tiny.module(), tmp_path, [SignalAt(2, signum), at_end])
    assert (caught.value.signum, caught.value.is_of_all) == (signum, True)
    assert stopped_at == [3]  # the step that the signal fell into is done


def test_a_second_signal_does_not_wait(tmp_path: Path) -> None:
    request, stopped_at = StopRequest(), []
    at_end = StopAtStepEnd(request, lambda trainer: stopped_at.append(trainer.global_step))
    with request.listening(), pytest.raises(Stopped) as caught:
        tiny.fit(tiny.module(), tmp_path, [SignalAt(2, signal.SIGINT, signal.SIGTERM), at_end])
    assert stopped_at == []
    assert not caught.value.is_of_all  # other ranks know nothing of it
    assert not request.is_stepping


def test_a_signal_that_comes_while_a_batch_is_waited_for_loses_no_step(tmp_path: Path) -> None:
    class SignalAtFetch(tiny.TinyData):
        fetched = 0

        def fetch(self, indices: Any, rng: Any) -> Any:
            self.fetched += 1
            if self.fetched == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().fetch(indices, rng)

    request, stopped_at = StopRequest(), []
    at_end = StopAtStepEnd(request, lambda trainer: stopped_at.append(trainer.global_step))
    loader = TimedLoader(tiny.loader(data=SignalAtFetch()), StepClock(), stop=request)
    with request.listening(), pytest.raises(Stopped):
        tiny.fit(tiny.module(), tmp_path, [at_end], batches=loader)
    assert stopped_at == [2]


class SignalInHook(tiny.Lightnings):
    """A LightningModule that gets a signal in one of its hooks after a number of steps, and counts the hook's ends."""

    def __init__(self, hook: str, step: int) -> None:
        super().__init__(tiny.module())
        self.done: list[int] = []

        def send(*_: Any) -> None:
            if self.trainer.global_step == step:
                os.kill(os.getpid(), signal.SIGTERM)
            self.done.append(self.trainer.global_step)

        setattr(self, hook, send)


@pytest.mark.parametrize(
    ("hook", "step", "stops_at"),
    [
        ("on_train_batch_end", 2, 2),
        ("on_train_batch_end", 3, 3),
        ("on_train_batch_start", 2, 3),
        ("on_validation_model_zero_grad", 3, 3),
        ("on_validation_end", 3, 3),
        ("on_train_epoch_start", 3, 3),
        ("on_train_epoch_end", 3, 3),
    ],
)
def test_a_signal_in_a_modules_hook_waits_for_its_end(tmp_path: Path, hook: str, step: int, stops_at: int) -> None:
    request, module = StopRequest(), SignalInHook(hook, step)
    saves = Checkpoints(tmp_path, CheckpointOptions(100, None, 9, "loss", "min"), {}, lambda *_: None)
    last = [saves, StopAtStepEnd(request, saves.save_before_end, saves.call_when_over)]
    trainer = make_user_trainer(tiny.options(), [BeforeUsers(saves)], tmp_path, last=last, loggers=[])
    with request.listening(), pytest.raises(Stopped):
        lit.fit(trainer, module, TimedLoader(tiny.loader(), StepClock(), stop=request), tiny.eval_loader(), None)
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert saved["global_step"] == stops_at
    assert module.done[-1] in (step, stops_at)


def test_outside_a_step_a_signal_raises_at_once_and_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest().listening(), pytest.raises(Stopped):
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


def fails(hook: str, step: int) -> pl.Callback:
    """Returns a callback that raises in a hook after a number of steps."""

    def fail(self: pl.Callback, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == step:
            raise KeyError("the callback's own fault")

    made: pl.Callback = type("Fails", (pl.Callback,), {hook: fail})()
    return made


class FailsAtFetch(tiny.TinyData):
    """Data that raise another error than those of their reader."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def fetch(self, indices: Any, rng: Any) -> Any:
        self.at -= 1
        if self.at < 0:
            raise MemoryError("no room for a batch")
        return super().fetch(indices, rng)


def fail_in(module: Any, what: str, step: int) -> None:
    """Makes the model raise in its forward or backward pass after a number of steps."""

    def fail(*_: Any) -> None:
        if module.trainer.global_step == step:
            raise KeyError("the model's own fault")

    def fail_in_backward(_: Any, __: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(fail)

    module.model.register_forward_hook(fail if what == "forward" else fail_in_backward)


@pytest.mark.parametrize(
    ("what", "step", "is_users"),
    few(
        [
            ("on_train_batch_end", 1, True),
            ("on_train_batch_end", 5, False),
            ("on_train_epoch_start", 3, True),
            ("training data", 3, False),
            ("training data", 4, False),
        ],
        3,
    ),
)
def test_a_failure_between_two_steps_loses_neither(tmp_path: Path, what: str, step: int, is_users: bool) -> None:
    """The resumed run ends with the weights of an undisturbed one, bit for bit."""

    def trained(folder: Path, own: list[Any], checkpoint: Path | None, data: Any) -> Any:
        saves = tiny.checkpoints(folder)
        callbacks = [saves, StopAtStepEnd(StopRequest(), saves.save_before_end)]
        module = tiny.module(dropout=0.3)
        users = {"users": own} if is_users else {}
        trainer = lit.make_trainer(tiny.options(max_steps=8), [*([] if is_users else own), *callbacks], folder, **users)
        lit.fit(trainer, module, tiny.loader(data=data or tiny.TinyData()), tiny.eval_loader(), checkpoint)
        return tiny.weights(module)

    undisturbed = trained(tmp_path / "one", [], None, None)
    data = FailsAtFetch(step) if what == "training data" else None
    own = [fails(what, step)] if what.startswith("on_") else []
    with pytest.raises((KeyError, MemoryError, DataError)):
        trained(tmp_path / "two", own, None, data)
    last = tmp_path / "two" / "last.ckpt"
    assert torch.load(last, weights_only=True)["global_step"] == step
    assert torch.equal(trained(tmp_path / "two", [], last, None), undisturbed)


@pytest.mark.parametrize("what", ["forward", "backward", "on_train_batch_start", "on_before_optimizer_step"])
def test_a_failure_within_a_step_loses_the_steps_since_the_last_checkpoint(tmp_path: Path, what: str) -> None:
    saves, module = tiny.checkpoints(tmp_path, every_steps=2), tiny.module()
    callbacks = [saves, StopAtStepEnd(StopRequest(), saves.save_before_end)]
    if not what.startswith("on_"):
        fail_in(module, what, 3)
    with pytest.raises(KeyError):
        tiny.fit(module, tmp_path, callbacks, users=[fails(what, 3)] if what.startswith("on_") else [])
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 2


class Draws(tiny.TinyModel):
    """A model that draws random numbers in a validation, too."""

    def loss(self, batch: Any) -> LossOutput:
        if not self.training:
            torch.rand(3)
        return super().loss(batch)


class InValidation(pl.Callback):
    """A callback that ends the run in the second batch of a validation: by an error, or by signals."""

    def __init__(self, step: int, *signums: int) -> None:
        self._step, self._signums = step, signums

    def on_validation_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int, *_: Any) -> None:
        if (trainer.global_step, batch_idx) == (self._step, 1):
            for signum in self._signums:
                os.kill(os.getpid(), signum)
            if not self._signums:
                raise KeyError("the evaluation's own fault")


class AtEpochEnd(pl.Callback):
    """A callback that sends this process a signal at the end of an epoch."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_train_epoch_end(self, trainer: pl.Trainer, module: Any) -> None:
        if trainer.global_step == self._step:
            os.kill(os.getpid(), signal.SIGTERM)


def with_plateau(
    folder: Path,
    rows: list[Any],
    own: Sequence[pl.Callback] = (),
    checkpoint: Path | None = None,
    *,
    every: int | None,
    monitor: str,
    save_every: int = 100,
    users: Sequence[pl.Callback] = (),
) -> torch.Tensor:
    """Trains three epochs of three steps with a rate that follows a metric; returns the weights, and adds the rows."""
    figures = Figures(
        lambda split, values, **at: rows.append((split, at["step"], values["loss"])), every=2, stop_on_nan=True
    )
    saves = Checkpoints(folder, CheckpointOptions(save_every, None, 9, "loss", "min"), {}, lambda *_: None)
    request = StopRequest()
    at_stop = StopAtStepEnd(request, saves.save_before_end, saves.call_when_over)
    plateau = partial(torch.optim.lr_scheduler.ReduceLROnPlateau, factor=0.5, patience=0, threshold=9.0)
    torch.manual_seed(3)
    model = Draws(dropout=0.3)
    module = tiny.module(model=model, scheduling=Scheduling(plateau, "step" if every else "epoch", monitor))
    options = tiny.options(max_steps=None, max_epochs=3, validate_every_steps=every)
    trainer = lit.make_trainer(options, [figures, *own, BeforeUsers(saves), saves, at_stop], folder, users=users)
    with request.listening():
        lit.fit(trainer, module, tiny.loader(), tiny.eval_loader(), checkpoint)
    return tiny.weights(module)


ENDS: dict[str, Any] = {
    "a signal": lambda step: InValidation(step, signal.SIGTERM),
    "a signal in the step before": lambda step: SignalAt(step - 1, signal.SIGTERM),
}
PLACES = [(2, 4, "val/loss"), (2, 6, "val/loss"), (None, 3, "val/loss"), (None, 6, "train/loss")]
AT_END = [("a signal at the epoch's end", None, 3, "val/loss"), ("a signal at the epoch's end", None, 9, "val/loss")]


@pytest.mark.parametrize(
    ("end", "every", "step", "monitor"),
    few([*((end, *place) for end, place in product(ENDS, PLACES)), *AT_END], 5),
)
def test_the_validation_of_a_step_that_a_signal_ends_is_held_once(
    tmp_path: Path, end: str, every: int | None, step: int, monitor: str
) -> None:
    """The resumed run has the weights and the rows of an undisturbed one."""
    train = partial(with_plateau, every=every, monitor=monitor)
    whole, rows, folder = list[Any](), list[Any](), tmp_path / "cut"
    undisturbed = train(tmp_path / "whole", whole)
    with pytest.raises(Stopped):
        train(folder, rows, [ENDS.get(end, AtEpochEnd)(step)])
    last = folder / "last.ckpt"
    assert torch.load(last, weights_only=True)["global_step"] == step
    resumed = train(folder, rows, checkpoint=last)
    assert rows == whole
    assert torch.equal(resumed, undisturbed)


@pytest.mark.parametrize("signums", [(), (signal.SIGTERM, signal.SIGTERM)])
def test_a_validation_that_fails_is_repeated_from_the_checkpoint_before(tmp_path: Path, signums: Any) -> None:
    train = partial(with_plateau, every=2, monitor="val/loss", save_every=1)
    undisturbed = train(tmp_path / "whole", [])
    with pytest.raises((KeyError, Stopped)):
        train(tmp_path / "cut", [], [InValidation(4, *signums)])
    last = tmp_path / "cut" / "last.ckpt"
    assert torch.load(last, weights_only=True)["global_step"] == 3
    assert torch.equal(train(tmp_path / "cut", [], checkpoint=last), undisturbed)


def test_averages_that_may_lack_a_step_are_not_saved(tmp_path: Path) -> None:
    """The callback that averages comes after the one that fails."""
    users = [fails("on_train_batch_end", 3), EMAWeightAveraging(decay=0.5)]
    with pytest.raises(KeyError):
        with_plateau(tmp_path, [], users=users, save_every=2, every=None, monitor="val/loss")
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 2


@pytest.mark.parametrize("hook", ["on_validation_end", "on_train_epoch_end"])
def test_nothing_is_saved_while_callbacks_see_the_end_of_a_validation_or_an_epoch(tmp_path: Path, hook: str) -> None:
    """Those that have seen it would count it twice, and a resumed run would skip the rest of it."""
    with pytest.raises(KeyError):
        with_plateau(tmp_path, [], [fails(hook, 3)], save_every=2, every=None, monitor="val/loss")
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 2
