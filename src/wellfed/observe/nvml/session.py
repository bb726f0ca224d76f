"""Opens and closes NVML, maps its error codes to exception types, and limits the wait for a driver."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from types import MappingProxyType, TracebackType
from typing import Any, Self, TypeVar

from wellfed.errors import WellfedError

Answer = TypeVar("Answer")
START_S = 15.0
"""Seconds for the first listing of the cards. Without persistence mode a driver wakes its cards one by one, which takes
seconds: https://docs.nvidia.com/deploy/driver-persistence/"""


class NvmlError(WellfedError):
    """Error of NVML; ``reason`` is a short text for other messages."""

    reason = "failed"

    def __init__(self, call: str, reason: str | None = None) -> None:
        self.call = call
        if reason is not None:
            self.reason = reason
        super().__init__(f"NVML {call}: {self.reason}")


class NvmlAbsentError(NvmlError):
    """The figure does not exist here. Nothing is broken."""

    reason = "not offered"


class NotSupportedError(NvmlAbsentError):
    """This card or MIG instance has no such figure."""

    reason = "not supported by this device"


class FunctionNotFoundError(NvmlAbsentError):
    """The driver or the pynvml module is older than the function."""

    reason = "function not found in this driver"


class LibraryNotFoundError(NvmlAbsentError):
    """NVML is missing: no NVIDIA driver is installed, or the container does not pass it through."""

    reason = "library not found"


class NoDataError(NvmlAbsentError):
    """The driver has no sample yet."""

    reason = "no data"


class VersionMismatchError(NvmlAbsentError):
    """The driver does not support this version of the call's argument structure."""

    reason = "argument version not known to this driver"


class NvmlStuckError(NvmlAbsentError):
    """A call did not return in time."""

    reason = "did not answer in time"


class GpuLostError(NvmlError):
    """The card fell off the bus or needs a reset. It does not come back within this process."""

    reason = "GPU is lost"


class NotFoundError(NvmlError):
    """No card, MIG slot or process has that name or number."""

    reason = "not found"


ERRORS: Mapping[int, tuple[type[NvmlError], str | None]] = MappingProxyType(
    {  # nvmlReturn_t, https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceEnumvs.html
        # NVML was closed more often than opened in this process, and must be reopened as after a loss.
        1: (GpuLostError, "NVML was shut down"),
        3: (NotSupportedError, None),
        4: (NvmlAbsentError, "no permission"),
        6: (NotFoundError, None),
        9: (NvmlAbsentError, "driver not loaded"),
        12: (LibraryNotFoundError, None),
        13: (FunctionNotFoundError, None),
        15: (GpuLostError, None),
        16: (GpuLostError, None),  # RESET_REQUIRED: lost to this process, too
        18: (NvmlAbsentError, "driver and library versions differ, reboot to load the new driver"),
        21: (NoDataError, None),
        25: (VersionMismatchError, None),
        28: (NotFoundError, None),
    }
)
"""Driver's code -> error type, and a reason if it differs from the type's own."""
_NOT_INSTALLED = "nvidia-ml-py is not installed (pip install nvidia-ml-py)"


def load_pynvml() -> Any:
    """Returns NVIDIA's ``pynvml`` module, which is imported only here.

    Raises:
        NvmlAbsentError: not installed, or the module of that name is not NVIDIA's.
    """
    try:
        module = importlib.import_module("pynvml")
    except ImportError as cause:
        raise NvmlAbsentError("import", _NOT_INSTALLED) from cause
    # The unofficial module has the same name and other signatures. Only NVIDIA's has this private function.
    if not hasattr(module, "_nvmlGetFunctionPointer"):
        raise NvmlAbsentError("import", unofficial_pynvml() or "the module named pynvml is not nvidia-ml-py's")
    return module


def unofficial_pynvml(version_of: Callable[[str], str] = importlib.metadata.version) -> str | None:
    """Returns a warning if the deprecated distribution ``pynvml`` is installed, else None."""
    try:
        version = version_of("pynvml")
    except importlib.metadata.PackageNotFoundError:
        return None
    return (
        f"the unofficial distribution pynvml {version} is installed; it shadows the module of nvidia-ml-py or makes "
        "torch warn. Run: pip uninstall pynvml && pip install --force-reinstall nvidia-ml-py"
    )


class NvmlSession:
    """NVML while the ``with`` block lasts.

    NVML counts its users, so sessions may overlap in threads of one process. A forked child opens its own.

    Raises on entering:
        NvmlAbsentError: no library, driver, permission or pynvml.
        NvmlError: NVML is there and failed.
    """

    def __init__(self, load: Callable[[], Any] = load_pynvml, *, tries: int = 1) -> None:
        """``tries``: how often a failing call is made. Use several where one failure matters, e.g. to list cards."""
        self._load = load
        self._library: Any = None
        self._found: dict[str, Any] = {}
        """Functions and constants of the library that were asked for."""
        self.tries = tries

    def __enter__(self) -> Self:
        self._library = self._load()
        try:
            self.ask("nvmlInit")
        except NvmlError:
            self._library = None
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        library, self._library, self._found = self._library, None, {}
        # A lost card makes the shutdown fail too; that must not hide how the block ended.
        with contextlib.suppress(library.NVMLError):
            library.nvmlShutdown()

    def ask(self, function: str, *args: Any, **kwargs: Any) -> Any:
        """Returns the result of the pynvml function of that name. Blocks for as long as the driver takes.

        Raises:
            NvmlAbsentError: there is no such figure here.
            GpuLostError: the card is gone.
            NvmlError: any other NVML error.
        """
        call = self._found.get(function) or self._of_library("function", function)
        errors = []
        for _ in range(self.tries):
            try:
                return call(*args, **kwargs)
            except UnicodeDecodeError as cause:  # the driver's text is not UTF-8
                return bytes(cause.object).decode(errors="replace")
            except getattr(self._library, "NVMLLibraryMismatchError", ()) as cause:
                # raised by pynvml if the driver lacks the latest version of a function
                raise FunctionNotFoundError(function) from cause
            except self._library.NVMLError as cause:
                kind, reason = ERRORS.get(cause.value, (NvmlError, str(cause).rstrip(".").lower()))
                errors.append(kind(function, reason))
                errors[-1].__cause__ = cause
        # A specific error repeats at each try; an unspecific one may have been a passing failure.
        raise next((error for error in errors if type(error) is not NvmlError), errors[0])

    def constant(self, name: str) -> Any:
        """Returns a constant of pynvml, e.g. ``NVML_TEMPERATURE_GPU``.

        Raises:
            FunctionNotFoundError: the installed nvidia-ml-py lacks it.
        """
        found = self._found.get(name)
        return self._of_library("constant", name) if found is None else found

    def _of_library(self, kind: str, name: str) -> Any:
        if self._library is None:
            raise RuntimeError("NVML was asked outside its session. Write: with NvmlSession() as nvml: ...")
        value = getattr(self._library, name, None)
        if value is None:
            raise FunctionNotFoundError(name, f"{kind} not found in this nvidia-ml-py")
        self._found[name] = value
        return value


def within(seconds: float, ask: Callable[[], Answer]) -> Answer:
    """Runs ``ask`` in a thread and returns or raises as it does. The thread is abandoned after the timeout.

    Raises:
        NvmlStuckError: it took longer.
    """
    future: Future[Answer] = Future()

    def run() -> None:
        try:
            future.set_result(ask())
        except Exception as error:  # noqa: BLE001  raised again in the caller
            future.set_exception(error)

    threading.Thread(target=run, name="wellfed-nvml", daemon=True).start()
    try:
        return future.result(seconds)
    except TimeoutError:
        if future.done():  # raised by ``ask`` itself
            raise
        raise NvmlStuckError("driver", f"did not answer within {seconds:g} s") from None
