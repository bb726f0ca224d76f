"""An error of a watcher is logged once and ends only the watching."""

import logging

import pytest

from wellfed.monitor.error_guard import Harmless, harmless


class Watcher(Harmless):
    def __init__(self, *, fails_to_end: bool = False) -> None:
        self.calls, self.ends, self._fails_to_end = 0, 0, fails_to_end

    @harmless
    def look(self, error: BaseException | None = None) -> None:
        self.calls += 1
        if error is not None:
            raise error

    def abandon(self) -> None:
        self.ends += 1
        if self._fails_to_end:
            raise OSError("again")


@pytest.mark.parametrize("fails_to_end", [False, True])
def test_the_first_error_is_told_and_nothing_is_done_afterwards(
    caplog: pytest.LogCaptureFixture, fails_to_end: bool
) -> None:
    watcher = Watcher(fails_to_end=fails_to_end)
    with caplog.at_level(logging.WARNING):
        watcher.look()
        watcher.look(ValueError("no such thing"))
        watcher.look(ValueError("nor this"))
        watcher.look()
    (told,) = caplog.messages
    assert told.startswith("Watcher watches no more (ValueError: no such thing (test_error_guard.py:")
    assert told.endswith("the training goes on.")
    assert (watcher.calls, watcher.ends) == (2, 1)


def test_ctrl_c_is_nobodys_error() -> None:
    with pytest.raises(KeyboardInterrupt):
        Watcher().look(KeyboardInterrupt())
