"""Lines that make the host wait for the card are named, and the watch restores all state."""

import sys
import sysconfig
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from tests.kit import tiny
from wellfed.contract import LossOutput
from wellfed.train.lightning.callbacks import synchronisations
from wellfed.train.lightning.callbacks.synchronisations import Synchronisations, place_of
from wellfed.train.lightning.prefetch import prefetched

pytestmark = pytest.mark.filterwarnings("ignore::Warning:lightning")
SAYS = "called a synchronizing CUDA operation (function f)"
HERE = str(Path(__file__).relative_to(Path.cwd()))


class Asking(tiny.TinyModel):
    """A model that reads its loss within a step, as logging does, and twice a tensor on the host."""

    def loss(self, batch: Any) -> LossOutput:
        output = super().loss(batch)
        self.latest = output.loss.item()
        for _ in range(2):
            assert self.net[0].weight[0, 0].cpu() < 9
        return output


ITEM = Asking.loss.__code__.co_firstlineno + 2


def found_in(
    tmp_path: Path, model: nn.Module | None = None, max_steps: int = 9, device_prefetch: int = 0, **changes: Any
) -> list[list[Any]]:
    """Returns the reports of a training on the simulated card."""
    told: list[Any] = []
    watch, module = Synchronisations(told.append), tiny.module(model=model)
    with prefetched(tiny.loader(), module, torch.device("cuda:0"), device_prefetch) as loader:
        tiny.fit(module, tmp_path, [watch], accelerator="gpu", batches=loader, max_steps=max_steps, **changes)
    return told


@pytest.mark.simulated
@pytest.mark.parametrize("device_prefetch", [0, 2])
def test_lines_of_the_model_are_named_with_how_often_they_wait(tmp_path: Path, device_prefetch: int) -> None:
    expected = [
        {"place": f"{HERE}:{ITEM + 2}", "per_step": 2},
        {"place": f"{HERE}:{ITEM}", "per_step": 1},
    ]
    assert found_in(tmp_path, Asking(), device_prefetch=device_prefetch) == [expected]
    assert torch.cuda.get_sync_debug_mode() == 0


@pytest.mark.simulated
@pytest.mark.parametrize(
    "changes",
    [{}, {"device_prefetch": 2}, {"gradient_clip": 1.0}, {"precision": "bf16-mixed"}],
    ids=["plain", "prefetch", "clip", "bf16"],
)
def test_a_step_of_ours_waits_nowhere(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert found_in(tmp_path, **changes) == [[]]


@pytest.mark.simulated
def test_a_callback_of_the_users_counts(tmp_path: Path) -> None:
    class Printing(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
            float(outputs["loss"])

    line = Printing.on_train_batch_end.__code__.co_firstlineno + 1
    assert found_in(tmp_path, users=[Printing()]) == [[{"place": f"{HERE}:{line}", "per_step": 1}]]


@pytest.mark.simulated
def test_a_step_that_fails_leaves_the_mode_off(tmp_path: Path) -> None:
    shown = warnings.showwarning
    watch = Synchronisations(lambda found: None)
    module = tiny.module(fail=lambda size, call: ValueError("a bug") if call == 2 else None)
    with pytest.raises(ValueError, match="a bug"):
        tiny.fit(module, tmp_path, [watch], accelerator="gpu")
    watch.close()
    assert torch.cuda.get_sync_debug_mode() == 0
    assert warnings.showwarning is shown
    assert "synchronizing" not in str(warnings.filters)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Holds the debug mode on a machine without a card."""
    state = SimpleNamespace(mode=0)

    def set_mode(mode: str | int) -> None:
        state.mode = {"default": 0, "warn": 1}.get(str(mode), mode)

    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: state.mode)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    return state


@pytest.fixture
def shown() -> Iterator[list[str]]:
    """Collects shown warnings, which would otherwise be errors of the test."""
    texts: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_: texts.append(str(message))  # type: ignore[assignment]
        yield texts


def steps(watch: Synchronisations, number: int, between: Callable[[], None] = lambda: None) -> None:
    for _ in range(number):
        between()
        trainer: Any = SimpleNamespace(accumulate_grad_batches=1)
        watch.on_train_batch_end(trainer, None, None, None, 0)


def wait() -> None:
    """Warns as a synchronising operation of torch does."""
    warnings.warn(SAYS, stacklevel=1)


def test_steps_two_and_three_are_watched_and_no_more(card: SimpleNamespace, shown: list[str]) -> None:
    told: list[Any] = []
    watch = Synchronisations(told.append)
    modes: list[int] = []
    steps(watch, 6, lambda: modes.append(card.mode))
    assert modes == [0, 1, 1, 0, 0, 0]
    assert told == [[]]


def test_other_warnings_and_those_of_our_threads_go_their_way(card: SimpleNamespace, shown: list[str]) -> None:
    told: list[Any] = []
    watch = Synchronisations(told.append)
    filters, before = list(warnings.filters), warnings.showwarning
    steps(watch, 1)

    def step() -> None:
        warnings.warn("look out", stacklevel=1)
        threads = [threading.Thread(target=wait, name=name) for name in ("wellfed-device-prefetch", "Dummy-7")]
        for thread in threads:
            thread.start()
            thread.join()

    steps(watch, 2, step)
    assert shown == ["look out"] * 2
    assert told == [[{"place": f"{HERE}:{wait.__code__.co_firstlineno + 2}", "per_step": 1}]]
    assert (warnings.filters, warnings.showwarning) == (filters, before)


def frames(*files: str) -> Any:
    """Returns a stack, the innermost call first."""
    frame = None
    for line, file in reversed(list(enumerate(files, start=1))):
        frame = SimpleNamespace(f_code=SimpleNamespace(co_filename=file), f_lineno=line, f_back=frame)
    return frame


def test_the_nearest_line_of_the_user_is_named() -> None:
    torchs, ours = torch.__path__[0] + "/nn/module.py", synchronisations.__file__
    library = str(Path(sysconfig.get_paths()["purelib"]) / "metrics" / "mean.py")
    assert place_of(frames(torchs, library, "/home/me/model.py", ours, "/home/me/train.py")) == "/home/me/model.py:3"
    assert place_of(frames(torchs, ours)) is place_of(None) is None
    assert place_of(sys._getframe()) == f"{HERE}:{sys._getframe().f_lineno}"
