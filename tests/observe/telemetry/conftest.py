"""What the tests of this room share: GPUs of the fake driver that are watched without a thread."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.fake_nvml.driver import FakeDriver, Scenario
from tests.kit.watched import Watched, watched_gpu
from wellfed.observe.machine_facts import GpuFacts
from wellfed.observe.telemetry.gpu import GpuSource


@pytest.fixture
def watch(fake_driver: FakeDriver) -> Iterator[Callable[..., Watched]]:
    """``watch(scenario)`` is a GpuSource of its GPUs; at the end it must have given everything back.

    ``gpus`` says which to watch; ``driver`` may lack functions; ``now_s`` is the driver's clock unless it is given.
    """
    with ExitStack() as stack:

        def begin(
            scenario: Scenario,
            gpus: list[GpuFacts] | None = None,
            driver: FakeDriver = fake_driver,
            now_s: Callable[[], float] | None = None,
            **options: object,
        ) -> Watched:
            loaded = stack.enter_context(driver.load(scenario))
            if gpus is None:
                gpus = [watched_gpu(index, gpu.uuid) for index, gpu in enumerate(scenario.gpus)]
            events: list[dict[str, object]] = []
            source = GpuSource(
                gpus,
                lambda kind, **facts: events.append({"kind": kind, **facts}),
                now_s=now_s or loaded.elapsed_s,
                **options,
            )
            watched = Watched(loaded, source, events)
            stack.callback(watched.end)
            return watched

        yield begin
