"""Opens and closes NVML, and raises its errors as `NvmlError`."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Mapping
from types import MappingProxyType, TracebackType
from typing import Any, Self

from wellfed.errors import WellfedError

NOT_SUPPORTED, NOT_FOUND, NO_LIBRARY, NO_FUNCTION, NO_DATA, UNKNOWN = 3, 6, 12, 13, 21, 999
"""Codes of nvmlReturn_t: https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceEnumvs.html"""
_REASONS: Mapping[int, str] = MappingProxyType(
    {
        1: "NVML was shut down",
        NOT_SUPPORTED: "not supported by this device",
        4: "no permission",
        NOT_FOUND: "not found",
        9: "driver not loaded",
        NO_LIBRARY: "library not found",
        NO_FUNCTION: "function not found in this driver",
        15: "GPU is lost",
        16: "GPU is lost",  # it needs a reset
        18: "driver and library versions differ, reboot to load the new driver",
        NO_DATA: "no data",
        25: "argument version not known to this driver",
    }
)
_ABSENT = frozenset({NOT_SUPPORTED, 4, 9, NO_LIBRARY, NO_FUNCTION, 18, NO_DATA, 25})
_LOST = frozenset({1, 15, 16})


class NvmlError(WellfedError):
    """Failed call of NVML, with the driver's code and a short reason for other messages."""

    def __init__(self, call: str, code: int = UNKNOWN, reason: str | None = None) -> None:
        self.call, self.code = call, code
        self.reason = reason or _REASONS.get(code, "failed")
        super().__init__(f"NVML {call}: {self.reason}")

    @property
    def is_absent(self) -> bool:
        """Whether the figure does not exist here. Nothing is broken."""
        return self.code in _ABSENT

    @property
    def is_lost(self) -> bool:
        """Whether the card fell off the bus or needs a reset. It does not come back within this process."""
        return self.code in _LOST


def load_pynvml() -> Any:
    """Returns the ``pynvml`` module of nvidia-ml-py, which is imported only here; raises `NvmlError` without it."""
    try:
        return importlib.import_module("pynvml")
    except ImportError as cause:
        raise NvmlError("import", NO_LIBRARY, "nvidia-ml-py is not installed (pip install nvidia-ml-py)") from cause


class NvmlSession:
    """NVML while the ``with`` block lasts.

    NVML counts its users, so sessions may overlap in threads of one process. A forked child opens its own.

    Raises on entering:
        NvmlError: NVML is absent, or failed.
    """

    def __init__(self, load: Callable[[], Any] = load_pynvml) -> None:
        self._load = load
        self._library: Any = None

    def __enter__(self) -> Self:
        self._library = self._load()
        self.ask("nvmlInit")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # A lost card makes the shutdown fail too; that must not hide how the block ended.
        with contextlib.suppress(self._library.NVMLError):
            self._library.nvmlShutdown()

    def ask(self, function: str, *args: Any, **kwargs: Any) -> Any:
        """Returns the result of the pynvml function of that name. Blocks for as long as the driver takes.

        Raises:
            NvmlError: with the driver's code.
        """
        call = self.constant(function)
        try:
            return call(*args, **kwargs)
        except self._library.NVMLError as cause:
            reason = _REASONS.get(cause.value) or str(cause).rstrip(".").lower()
            raise NvmlError(function, cause.value, reason) from cause
        except getattr(self._library, "NVMLLibraryMismatchError", ()) as cause:  # the driver is older than pynvml
            raise NvmlError(function, NO_FUNCTION) from cause

    def constant(self, name: str) -> Any:
        """Returns a constant of pynvml, e.g. ``NVML_TEMPERATURE_GPU``.

        Raises:
            NvmlError: the installed nvidia-ml-py lacks it.
        """
        value = getattr(self._library, name, None)
        if value is None:
            raise NvmlError(name, NO_FUNCTION, "not found in this nvidia-ml-py")
        return value
