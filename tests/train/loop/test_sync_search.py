"""Lines that make the host wait for the card are named, and the watch restores all state."""

import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.kit import loop, tiny
from wellfed.contract import LossOutput
from wellfed.train.loop import sync_search
from wellfed.train.loop.place import Place
from wellfed.train.loop.sync_search import find_synchronisations, place_of
from wellfed.train.loop.training import Watchers

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
    model: nn.Module | None = None, *, device_prefetch: int = 0, precision: str = "32-true", **changes: Any
) -> list[list[Any]]:
    """Returns the reports of a training on the simulated card."""
    told: list[Any] = []
    watchers, placed = Watchers(sync_search=find_synchronisations(told.append)), loop.model(model=model)
    placed.place = Place("gpu", precision=precision)
    with placed.prefetched(tiny.loader(), device_prefetch, is_training=True) as loader:
        loop.fit(placed, loader, watchers=watchers, max_steps=9, **changes)
    return told


@pytest.mark.simulated
@pytest.mark.parametrize("device_prefetch", [0, 2])
def test_lines_of_the_model_are_named_with_how_often_they_wait(device_prefetch: int) -> None:
    expected = [
        {"place": f"{HERE}:{ITEM + 2}", "per_step": 2},
        {"place": f"{HERE}:{ITEM}", "per_step": 1},
    ]
    assert found_in(Asking(), device_prefetch=device_prefetch) == [expected]
    assert torch.cuda.get_sync_debug_mode() == 0


@pytest.mark.simulated
@pytest.mark.parametrize(
    "changes",
    [{}, {"device_prefetch": 2}, {"gradient_clip": 1.0}, {"precision": "bf16-mixed"}],
    ids=["plain", "prefetch", "clip", "bf16"],
)
def test_a_step_of_ours_waits_nowhere(changes: dict[str, Any]) -> None:
    assert found_in(**changes) == [[]]


@pytest.mark.simulated
def test_a_step_that_fails_leaves_the_mode_off() -> None:
    shown = warnings.showwarning
    watch = find_synchronisations(lambda found: None)
    placed = loop.model(fail=lambda size, call: ValueError("a bug") if call == 2 else None)
    with pytest.raises(ValueError, match="a bug"):
        loop.fit(placed, watchers=Watchers(sync_search=watch), accelerator="gpu")
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


def steps(watch: Iterator[None], number: int, between: Callable[[], None] = lambda: None) -> None:
    for _ in range(number):
        between()
        next(watch, None)


def wait() -> None:
    """Warns as a synchronising operation of torch does."""
    warnings.warn(SAYS, stacklevel=1)


def test_steps_two_and_three_are_watched_and_no_more(card: SimpleNamespace, shown: list[str]) -> None:
    told: list[Any] = []
    watch = find_synchronisations(told.append)
    modes: list[int] = []
    steps(watch, 6, lambda: modes.append(card.mode))
    assert modes == [0, 1, 1, 0, 0, 0]
    assert told == [[]]


def test_other_warnings_go_their_way(card: SimpleNamespace, shown: list[str]) -> None:
    told: list[Any] = []
    watch = find_synchronisations(told.append)
    filters, before = list(warnings.filters), warnings.showwarning
    steps(watch, 1)

    def step() -> None:
        warnings.warn("look out", stacklevel=1)
        wait()

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
    torchs, ours = torch.__path__[0] + "/nn/module.py", sync_search.__file__
    library = str(Path(sysconfig.get_paths()["purelib"]) / "metrics" / "mean.py")
    assert place_of(frames(torchs, library, "/home/me/model.py", ours, "/home/me/train.py")) == "/home/me/model.py:3"
    assert place_of(frames(torchs, ours)) is place_of(None) is None
    assert place_of(sys._getframe()) == f"{HERE}:{sys._getframe().f_lineno}"
