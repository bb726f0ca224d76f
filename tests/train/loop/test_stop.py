"""Signals and errors: what a run has saved then goes on as an undisturbed one."""

import os
import signal
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kit import loop, tiny
from tests.kit.few import few
from wellfed.contract import LossOutput
from wellfed.errors import DataError
from wellfed.process import Stopped, StopRequest
from wellfed.train.loop.figures import Figures
from wellfed.train.plain_model.scheduling import Scheduling


def send(*signums: int) -> None:
    for signum in signums:
        os.kill(os.getpid(), signum)


def signals_in_step(step: int, *signums: int) -> Any:
    """Returns a function of size and call of a `TinyModel` that sends signals in the middle of a step."""

    def fail(size: int, call: int) -> None:
        if call == step:
            send(*signums)

    return fail


def stopped(tmp_path: Path, fail: Any = None, batches: Any = None) -> tuple[Stopped, int | None]:
    """Trains until a signal ends it; returns the error and the step of the checkpoint."""
    request, kept = StopRequest(), loop.checkpoints(tmp_path)
    with request.listening(), pytest.raises(Stopped) as caught:
        loop.fit(loop.model(fail=fail), batches, checkpoints=kept, stop=request)
    assert not request.is_stepping
    return caught.value, kept.last_step


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_after_its_step_with_a_checkpoint(tmp_path: Path, signum: int) -> None:
    error, step = stopped(tmp_path, signals_in_step(3, signum))
    assert error.signum == signum
    assert step == 3  # the step that the signal fell into is done


def test_a_second_signal_does_not_wait(tmp_path: Path) -> None:
    assert stopped(tmp_path, signals_in_step(3, signal.SIGINT, signal.SIGTERM))[1] is None


def test_a_signal_that_comes_while_a_batch_is_waited_for_loses_no_step(tmp_path: Path) -> None:
    class SignalAtFetch(tiny.TinyData):
        fetched = 0

        def fetch(self, indices: Any, rng: Any) -> Any:
            self.fetched += 1
            if self.fetched == 3:
                send(signal.SIGTERM)
            return super().fetch(indices, rng)

    assert stopped(tmp_path, batches=tiny.loader(data=SignalAtFetch()))[1] == 2


def test_outside_a_step_a_signal_raises_at_once_and_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest().listening(), pytest.raises(Stopped):
        send(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


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


@pytest.mark.parametrize("step", [3, 4])
def test_a_failure_between_two_steps_loses_neither(tmp_path: Path, step: int) -> None:
    """The resumed run ends with the weights of an undisturbed one, bit for bit."""

    def trained(folder: Path, checkpoint: Path | None, data: Any) -> Any:
        placed, more = loop.model(dropout=0.3), {"checkpoints": loop.checkpoints(folder), "max_steps": 8}
        loop.fit(placed, tiny.loader(data=data), checkpoint=checkpoint, validation=tiny.eval_loader(), **more)
        return loop.weights(placed)

    undisturbed = trained(tmp_path / "one", None, None)
    with pytest.raises((MemoryError, DataError)):
        trained(tmp_path / "two", None, FailsAtFetch(step))
    last = tmp_path / "two" / "last.ckpt"
    assert torch.load(last, weights_only=True)["global_step"] == step
    assert torch.equal(trained(tmp_path / "two", last, None), undisturbed)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_failure_within_a_step_loses_the_steps_since_the_last_checkpoint(tmp_path: Path, where: str) -> None:
    class Fails(tiny.TinyModel):
        def fault(self, *_: Any) -> None:
            if self.calls == 4:
                raise KeyError("the model's own fault")

        def loss(self, batch: Any) -> LossOutput:
            output = super().loss(batch)
            if where == "forward":
                self.fault()
            output.loss.register_hook(self.fault)
            return output

    with pytest.raises(KeyError):
        loop.fit(loop.model(model=Fails()), checkpoints=loop.checkpoints(tmp_path, every_steps=2))
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 2


class Disturbed(tiny.TinyModel):
    """A model that draws in validations too, and calls a function with ``train`` or ``val`` and the step."""

    def __init__(self, disturb: Callable[[str, int], None]) -> None:
        super().__init__(dropout=0.3)
        self.disturb, self.steps = disturb, 0

    def loss(self, batch: Any) -> LossOutput:
        self.steps += self.training
        if not self.training:
            torch.rand(3)
        self.disturb("train" if self.training else "val", self.steps)
        return super().loss(batch)


def with_plateau(
    folder: Path,
    rows: list[Any],
    disturb: Callable[[str, int], None] = lambda split, step: None,
    checkpoint: Path | None = None,
    *,
    every: int | None,
    monitor: str,
    save_every: int = 100,
) -> torch.Tensor:
    """Trains three epochs of three steps with a rate that follows a metric; returns the weights, and adds the rows."""
    take = lambda split, values, **at: rows.append((split, at["step"], values["loss"]))  # noqa: E731
    request, kept = StopRequest(), loop.checkpoints(folder, every_steps=save_every, keep_last=9)
    plateau = partial(torch.optim.lr_scheduler.ReduceLROnPlateau, factor=0.5, patience=0, threshold=9.0)
    torch.manual_seed(3)
    placed = loop.model(model=Disturbed(disturb), scheduling=Scheduling(plateau, "step" if every else "epoch", monitor))
    with request.listening():
        loop.fit(
            placed,
            checkpoint=checkpoint,
            checkpoints=kept,
            figures=Figures(take, every=2, stops_on_nan=True),
            validation=tiny.eval_loader(),
            stop=request,
            max_steps=None,
            max_epochs=3,
            validate_every_steps=every,
        )
    return loop.weights(placed)


def signal_in(split: str, step: int) -> Callable[[str, int], None]:
    """Returns a function for `Disturbed` that sends a signal in the step, or in the first batch of its validation."""
    sent: list[int] = []

    def disturb(where: str, at: int) -> None:
        if (where, at) == (split, step) and not sent:
            sent.append(at)
            send(signal.SIGTERM)

    return disturb


PLACES = [(2, 4, "val/loss"), (2, 6, "val/loss"), (None, 3, "val/loss"), (None, 6, "train/loss"), (None, 9, "val/loss")]


@pytest.mark.parametrize(
    ("split", "every", "step", "monitor"),
    few([(split, *place) for split, place in product(("val", "train"), PLACES)], 5),
)
def test_the_validation_of_a_step_that_a_signal_ends_is_held_once(
    tmp_path: Path, split: str, every: int | None, step: int, monitor: str
) -> None:
    """The resumed run has the weights and the rows of an undisturbed one."""
    train = partial(with_plateau, every=every, monitor=monitor)
    whole, rows, folder = list[Any](), list[Any](), tmp_path / "cut"
    undisturbed = train(tmp_path / "whole", whole)
    with pytest.raises(Stopped):
        train(folder, rows, signal_in(split, step))
    last = folder / "last.ckpt"
    assert torch.load(last, weights_only=True)["global_step"] == step
    if step == 9:  # it was over
        assert rows == whole
        return
    resumed = train(folder, rows, checkpoint=last)
    assert rows == whole
    assert torch.equal(resumed, undisturbed)


@pytest.mark.parametrize("signums", [(), (signal.SIGTERM, signal.SIGTERM)])
def test_a_validation_that_fails_is_repeated_from_the_checkpoint_before(tmp_path: Path, signums: Any) -> None:
    def disturb(where: str, step: int) -> None:
        if (where, step) == ("val", 4):
            send(*signums)
            if not signums:
                raise KeyError("the evaluation's own fault")

    train = partial(with_plateau, every=2, monitor="val/loss", save_every=1)
    undisturbed = train(tmp_path / "whole", [])
    with pytest.raises((KeyError, Stopped)):
        train(tmp_path / "cut", [], disturb)
    last = tmp_path / "cut" / "last.ckpt"
    assert torch.load(last, weights_only=True)["global_step"] == 3
    assert torch.equal(train(tmp_path / "cut", [], checkpoint=last), undisturbed)
