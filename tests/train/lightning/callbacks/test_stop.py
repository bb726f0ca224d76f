import os
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from tests.kit import tiny
from tests.kit.few import few
from wellfed.data.eval_loader import EvalLoader
from wellfed.errors import DataError
from wellfed.process import Stopped, StopRequest
from wellfed.train.lightning import trainer as lit
from wellfed.train.lightning.callbacks.stop import StopAtStepEnd

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
    with request.listening(), pytest.raises(Stopped):
        tiny.fit(tiny.module(), tmp_path, [at_end], batches=tiny.loader(data=SignalAtFetch()))
    assert stopped_at == [2]


def test_a_signal_in_a_validation_waits_for_its_figures(tmp_path: Path) -> None:
    class SignalInValidation(pl.Callback):
        def on_validation_batch_start(self, *_: Any) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    from wellfed.train.lightning import trainer as lit

    request, stopped_at = StopRequest(), []
    at_end = StopAtStepEnd(request, lambda trainer: stopped_at.append(trainer.global_step))
    trainer = lit.make_trainer(tiny.options(), [SignalInValidation(), at_end], tmp_path)
    with request.listening(), pytest.raises(Stopped):
        lit.fit(trainer, tiny.module(), tiny.loader(), tiny.eval_loader(batch_size=70), None)
    assert stopped_at == [3]


def test_outside_a_step_a_signal_raises_at_once_and_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest().listening(), pytest.raises(Stopped):
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_sample_that_fails_loses_no_step(tmp_path: Path) -> None:
    class FailsAtFetch(tiny.TinyData):
        fetched = 0

        def fetch(self, indices: Any, rng: Any) -> Any:
            self.fetched += 1
            if self.fetched >= 3:
                raise ValueError("damaged")
            return super().fetch(indices, rng)

    request, saved_at = StopRequest(), []
    at_end = StopAtStepEnd(request, lambda trainer: saved_at.append(trainer.global_step))
    with request.listening(), pytest.raises(DataError):
        tiny.fit(tiny.module(), tmp_path, [at_end], batches=tiny.loader(data=FailsAtFetch()))
    assert saved_at == [2]


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
    """Makes the model raise in its forward or backward pass after a number of steps, having drawn random numbers."""

    def fail(*_: Any) -> None:
        if module.trainer.global_step == step:
            torch.rand(3)
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
            ("on_train_batch_start", 2, True),
            ("on_train_batch_start", 4, False),
            ("on_train_epoch_start", 3, True),
            ("on_train_epoch_end", 6, True),
            ("on_validation_start", 3, False),
            ("on_validation_batch_end", 6, True),
            ("validation data", 3, False),
            ("training data", 3, False),
            ("training data", 4, False),
            ("forward", 4, False),
            ("backward", 2, False),
            ("on_before_optimizer_step", 2, True),
        ],
        5,
    ),
)
def test_a_failure_between_two_steps_loses_neither(tmp_path: Path, what: str, step: int, is_users: bool) -> None:
    """The resumed run ends with the weights of an undisturbed one, bit for bit."""

    def trained(
        folder: Path, own: list[Any], checkpoint: Path | None, data: Any, val: Any, fails_in: str | None = None
    ) -> Any:
        saves = tiny.checkpoints(folder)
        request = StopRequest()
        callbacks = [saves, StopAtStepEnd(request, saves.save_before_end)]
        module = tiny.module(dropout=0.3)
        if fails_in is not None:
            fail_in(module, fails_in, step)
        users = {"users": own} if is_users else {}
        trainer = lit.make_trainer(tiny.options(max_steps=8), [*([] if is_users else own), *callbacks], folder, **users)
        loader = tiny.loader(data=data) if data is not None else tiny.loader()
        lit.fit(trainer, module, loader, EvalLoader(val or tiny.TinyData(), 32, seed=1), checkpoint)
        return tiny.weights(module)

    undisturbed = trained(tmp_path / "one", [], None, None, None)
    data = FailsAtFetch(step) if what == "training data" else None
    val = FailsAtFetch(2 * 3 if step > 3 else 0) if what == "validation data" else None
    own = [fails(what, step)] if what.startswith("on_") else []
    with pytest.raises((KeyError, MemoryError, DataError)):
        trained(tmp_path / "two", own, None, data, val, what if what in ("forward", "backward") else None)
    last = tmp_path / "two" / "last.ckpt"
    assert torch.load(last, weights_only=True)["global_step"] == step
    assert torch.equal(trained(tmp_path / "two", [], last, None, None), undisturbed)


def test_nothing_is_saved_in_the_middle_of_a_step(tmp_path: Path) -> None:
    class FailsHalfWay(torch.optim.SGD):
        """An optimizer that changes a weight, then raises."""

        def step(self, closure: Any = None) -> Any:
            loss = closure() if closure is not None else None
            with torch.no_grad():
                self.param_groups[0]["params"][0].add_(1.0)
            if saves_trainer[0].global_step == 2:
                raise KeyError("half way")
            return loss

    saves_trainer: list[Any] = []

    class Remember(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
            saves_trainer.append(trainer)

    saves = tiny.checkpoints(tmp_path)
    callbacks = [Remember(), saves, StopAtStepEnd(StopRequest(), saves.save_before_end)]
    with pytest.raises(KeyError):
        tiny.fit(tiny.module(optimizer=FailsHalfWay), tmp_path, callbacks)
    assert not list(tmp_path.glob("*.ckpt"))


def test_an_error_of_the_save_does_not_hide_what_came_first(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def broken(trainer: pl.Trainer) -> None:
        raise RuntimeError("can't pickle this")

    with pytest.raises(KeyError):
        tiny.fit(tiny.module(), tmp_path, [fails("on_train_batch_start", 2), StopAtStepEnd(StopRequest(), broken)])
    assert "The state after step 2 could not be saved: can't pickle this" in caplog.text
