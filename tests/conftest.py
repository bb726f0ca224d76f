"""What all tests share: programs that a machine may lack, and the GPU that it may lack."""

import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.abc import MetaPathFinder
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers

from tests.fake_cuda.machine import FakeCuda
from tests.fake_cuda.marker import pytest_runtest_protocol, simulated_machine
from tests.fake_nvml.driver import FakeDriver
from tests.kit.required_tools import find_tool
from wellfed.process import STOPS

__all__ = ["pytest_runtest_protocol"]

pytest_plugins = ["wellfed.testing"]

# Tests stand in folders of their own, and so do the programs that they start.
os.environ["WELLFED_PROJECT"] = str(Path(__file__).resolve().parents[1])

# Under nohup, programs that tests start would ignore a hangup, too. A handler is not handed down.
if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)

# The same verdict every time, on a busy machine too; `make test-all` tries more examples, and its own each time.
settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=40)
settings.register_profile("fresh", deadline=None, max_examples=200)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))
if settings().derandomize:
    # It also draws numbers that stand in loaded modules of this project: examples would depend on the tests before.
    providers.is_local_module_file = lambda path: False


class LeanLightning(MetaPathFinder):
    """Imports torchmetrics and the compiler of torch as a run does when a test file is the first to import Lightning:
    each takes as long as torch."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        if fullname == "lightning":
            sys.meta_path.remove(self)
            from wellfed.observe.loggers import late_imports

            late_imports.defer_torchmetrics()
            late_imports.defer_dynamo()


sys.meta_path.insert(0, LeanLightning())
gc.disable()  # until all is imported, which leaves next to no garbage


def pytest_collection_finish() -> None:
    """What is imported by now stays to the end: each collection of garbage, of which there are thousands in a session,
    would look at all of it again."""
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def handlers_of_signals() -> Iterator[None]:
    """Restores them: a run that was stopped ignores further signals, and so would processes that are started later."""
    before = [(number, signal.getsignal(number)) for number in STOPS]
    yield
    for number, handler in before:
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


@pytest.fixture(scope="session")
def require_tool() -> Callable[[str], Path]:
    """``require_tool("cc")`` is the program's path; without it the test is skipped with the way to install it.

    A name in WELLFED_REQUIRE (``cc,chromium``; .ci/run sets it) turns the skip into a failure.
    """
    return lambda name: find_tool(name, os.environ.get("WELLFED_REQUIRE", ""))


@pytest.fixture(scope="session")
def cc(require_tool: Callable[[str], Path]) -> Path:
    """A C compiler."""
    return require_tool("cc")


@pytest.fixture(scope="session")
def chromium(require_tool: Callable[[str], Path]) -> Path:
    """A browser that runs without a display."""
    return require_tool("chromium")


@pytest.fixture(scope="session")
def fake_driver(cc: Path, tmp_path_factory: pytest.TempPathFactory) -> FakeDriver:
    """A driver library that plays scenarios to the real pynvml: ``environment`` for subprocesses, ``load`` for here."""
    if sys.platform != "linux":
        pytest.skip("the fake driver is a Linux library")
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # all workers of a session share what one has compiled
    (folder / "fake_driver").mkdir(exist_ok=True)
    return FakeDriver(cc, folder / "fake_driver")


@pytest.fixture(scope="session")
def fake_cuda() -> FakeCuda:
    """A machine with simulated CUDA cards: ``environment(cards=2, mib=512)`` for subprocesses."""
    return simulated_machine()


@pytest.fixture
def all_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every extra were installed."""
    monkeypatch.setattr("wellfed.config.faults.check_composed.is_installed", lambda package: True)


@pytest.fixture
def at_once() -> Iterator[Callable[..., None]]:
    """``at_once(num, *calls)`` calls each with 0 ... num-1, all in threads of their own that change turns often."""
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def run(num: int, *calls: Callable[[int], object]) -> None:
        together = threading.Barrier(len(calls))

        def repeat(call: Callable[[int], object]) -> None:
            together.wait()
            for number in range(num):
                call(number)

        with ThreadPoolExecutor(len(calls)) as pool:
            for task in [pool.submit(repeat, call) for call in calls]:
                task.result()

    yield run
    sys.setswitchinterval(interval_s)
