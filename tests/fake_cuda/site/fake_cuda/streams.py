"""torch.cuda.Stream and torch.cuda.Event on the simulated cards."""

from __future__ import annotations

from types import ModuleType

import torch
import torch.cuda


def fill_in(driver: ModuleType) -> None:
    def index_of(device):
        return torch.cuda._utils._get_device_index(device, optional=True)

    class Stream(torch.Stream):
        def __new__(cls, device=None, priority=0, **kwargs):
            if kwargs.get("stream_id") is not None:
                return super().__new__(
                    cls,
                    stream_id=kwargs["stream_id"],
                    device_index=kwargs["device_index"],
                    device_type=kwargs["device_type"],
                )
            return super().__new__(cls, device=torch.device("cuda", index_of(device)), priority=priority)

        cuda_stream = property(lambda self: self.stream_id)

        def record_event(self, event=None):
            event = Event() if event is None else event
            event.record(self)
            return event

        def wait_stream(self, stream):
            self.wait_event(stream.record_event())

    class Event(torch.Event):
        def __new__(cls, enable_timing=False, blocking=False, interprocess=False, external=False):
            return super().__new__(cls, device="cuda", enable_timing=enable_timing)

        def record(self, stream=None):
            super().record(torch.cuda.current_stream() if stream is None else stream)

        def wait(self, stream=None):
            super().wait(torch.cuda.current_stream() if stream is None else stream)

        def elapsed_time(self, end_event):
            return driver.elapsed(self.event_id, end_event.event_id)

    for each in (Stream, Event):
        each.__module__ = "torch.cuda"
        setattr(torch.cuda, each.__name__, each)
        setattr(torch.cuda.streams, each.__name__, each)
