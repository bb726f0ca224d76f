from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from tests.lit import tiny
from wellfed.errors import DataError
from wellfed.lit.callbacks.stop import StopAtStepEnd
from wellfed.stop_request import Stopped, StopRequest

pytestmark = pytest.mark.filterwarnings("ignore::Warning:lightning")


class SignalAt(pl.Callback):
    """Sends this process a signal in the middle of a step."""

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

    from wellfed.lit import trainer as lit

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
