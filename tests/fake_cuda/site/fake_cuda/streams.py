"""torch.cuda.Stream and torch.cuda.Event on the simulated cards, with the signatures of a CUDA build's."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import torch.cuda

_driver: Any = None


class Stream(torch.Stream):
    """As torch.cuda.Stream; ``priority`` changes nothing."""

    def __new__(cls, device: Any = None, priority: int = 0, **known: int) -> Stream:
        if known.get("stream_id") is not None:  # an existing one
            return super().__new__(cls, **known)
        index = torch.cuda._utils._get_device_index(device, optional=True)
        return super().__new__(cls, device=torch.device("cuda", index), priority=priority)

    @property
    def cuda_stream(self) -> int:
        """What stands for its handle."""
        return self.stream_id

    def record_event(self, event: Any = None) -> Any:
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_stream(self, stream: Any) -> None:
        self.wait_event(stream.record_event())


class Event(torch.Event):
    """As torch.cuda.Event; ``blocking`` changes nothing, and there are no interprocess or external ones."""

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> Event:
        if interprocess or external:
            raise NotImplementedError("the simulated cards have no interprocess or external events")
        return super().__new__(cls, device="cuda", enable_timing=enable_timing)

    def record(self, stream: Any = None) -> None:
        super().record(torch.cuda.current_stream() if stream is None else stream)

    def wait(self, stream: Any = None) -> None:
        super().wait(torch.cuda.current_stream() if stream is None else stream)

    def elapsed_time(self, end_event: Any) -> float:
        return _driver.elapsed_ms(self.event_id, end_event.event_id)


def fill_in(driver: ModuleType) -> None:
    """Put them in the place of those that a CPU build has."""
    global _driver  # noqa: PLW0603  one machine a process
    _driver = driver
    for each in (Stream, Event):
        each.__module__ = "torch.cuda"
        setattr(torch.cuda, each.__name__, each)
        setattr(torch.cuda.streams, each.__name__, each)
