"""Seeds, saves and restores all random generators that a model may draw from."""

from __future__ import annotations

import copy
import ctypes
import os
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from itertools import islice
from typing import Any

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """Seeds Python, numpy and torch in this process, and in its children through Lightning's environment variables."""
    seed %= 2**32
    os.environ["PL_GLOBAL_SEED"], os.environ["PL_SEED_WORKERS"] = str(seed), "0"
    seed_all(seed)


def seed_all(seed: int) -> None:
    """Seeds Python, numpy and torch (CPU and GPUs) in this process only."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def state(device: torch.device | None = None) -> dict[str, Any]:
    """Returns the states of torch, numpy and Python, as values that a weights-only load accepts.

    Does not synchronize with the device.

    Args:
        device: the only GPU whose state is saved; None = all GPUs, if CUDA is in use.
    """
    name, keys, place, has_gauss, gauss = np.random.get_state()
    version, numbers, gauss_next = random.getstate()
    cuda: list[torch.Tensor] = []
    if torch.cuda.is_initialized() and (device is None or device.type == "cuda"):  # type: ignore[no-untyped-call]
        cuda = torch.cuda.get_rng_state_all() if device is None else [torch.cuda.get_rng_state(device)]
    return {
        "torch": torch.get_rng_state(),
        "cuda": cuda,
        "numpy": [str(name), torch.from_numpy(np.asarray(keys).astype(np.int64)), int(place), int(has_gauss), gauss],
        "python": [version, list(numbers), gauss_next],
    }


def restore(saved: dict[str, Any], device: torch.device | None = None) -> None:
    """Restores the result of `state`: the state of ``device``, None = those of all GPUs. If it has those of all GPUs of
    an earlier process, as checkpoints once had, that of the device's number is taken."""
    torch.set_rng_state(saved["torch"].cpu())
    cuda = [each.cpu() for each in saved["cuda"]]
    if cuda and torch.cuda.is_available():
        if device is None:
            torch.cuda.set_rng_state_all(cuda)
        elif device.type == "cuda":
            torch.cuda.set_rng_state(cuda[(device.index or 0) % len(cuda)], device)
    name, keys, place, has_gauss, gauss = saved["numpy"]
    np.random.set_state((name, keys.cpu().numpy().astype(np.uint32), place, has_gauss, gauss))
    version, numbers, gauss_next = saved["python"]
    random.setstate((version, tuple(numbers), gauss_next))


class GeneratorStates:
    """The states of all generators when a step began, to go back to within this process.

    `take` costs a microsecond, 50 times less than `state`: numpy and Python are asked for their states only after
    something was drawn, which shows in the memory of their generators.
    """

    def __init__(self, device: torch.device) -> None:
        """``device``: the only GPU whose state is saved."""
        self._device = device if device.type == "cuda" else None
        self._torch: torch.Tensor | None = None
        self._cuda: torch.Tensor | None = None
        self._numpy: Any = np.random.get_state()
        self._python = random.getstate()
        self._numpy_generator, self._numpy_memory = _numpy_memory()
        self._python_memory = _python_memory(random._inst) if _shows_draws() else None
        self._numpy_before = self._python_before = b""

    def take(self) -> None:
        """Saves the states; does not synchronize with the device."""
        self._torch = torch.default_generator.get_state()
        if self._device is not None:
            self._cuda = torch.cuda.get_rng_state(self._device)
        is_usual = self._numpy_memory is not None and _bit_generator() is self._numpy_generator
        memory = self._numpy_memory.raw if is_usual and self._numpy_memory is not None else b""
        # The second of a pair of normal numbers is kept elsewhere: drawing it does not show in the memory.
        if not memory or memory != self._numpy_before or self._numpy[3]:
            self._numpy, self._numpy_before = np.random.get_state(), memory
        memory = b"" if self._python_memory is None else self._python_memory.raw
        if not memory or memory != self._python_before or _gauss_next() != self._python[2]:
            self._python, self._python_before = random.getstate(), memory

    def restore(self) -> None:
        """Goes back to the latest `take`."""
        assert self._torch is not None
        torch.default_generator.set_state(self._torch)
        if self._cuda is not None and self._device is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)
        np.random.set_state(self._numpy)
        random.setstate(self._python)


_Memory = ctypes.Array[ctypes.c_char]
_NUMPY_BYTES = 625 * 4
"""Bytes of numpy's MT19937: 624 numbers and the position among them
(https://numpy.org/doc/stable/reference/random/bit_generators/mt19937.html)."""
_PYTHON_BYTES = random.Random.__base__.__basicsize__ - object.__basicsize__  # type: ignore[union-attr]
"""Bytes that Python's generator has beyond those of any object: its numbers and the position among them."""
_bit_generator: Callable[[], Any] = np.random.get_bit_generator  # type: ignore[attr-defined]


def _gauss_next() -> float | None:
    """Returns the second of a pair of normal numbers that Python's generator keeps."""
    return random._inst.gauss_next  # type: ignore[attr-defined,no-any-return]


def _numpy_memory() -> tuple[Any, _Memory | None]:
    """Returns numpy's generator, and its memory if it is the usual one."""
    found = _bit_generator()
    if type(found) is not np.random.MT19937:
        return found, None
    return found, (ctypes.c_char * _NUMPY_BYTES).from_address(found.ctypes.state_address)


def _python_memory(generator: random.Random) -> _Memory:
    """Returns the memory of a generator of CPython."""
    return (ctypes.c_char * _PYTHON_BYTES).from_address(id(generator) + object.__basicsize__)


@cache
def _shows_draws() -> bool:
    """Returns whether each draw from a generator of Python shows in its memory, as in CPython."""
    if sys.implementation.name != "cpython" or not hasattr(random, "_inst") or _PYTHON_BYTES < 625 * 4:
        return False
    tried, seen = random.Random(1), set()
    memory = _python_memory(tried)
    for _ in range(3):
        words = b"".join(word.to_bytes(4, sys.byteorder) for word in tried.getstate()[1][:-1])
        if words not in memory.raw:
            return False
        seen.add(memory.raw)
        tried.random()
    return len(seen) == 3


def numbers() -> tuple[Any, ...]:
    """Returns values that change when Python's, numpy's or torch's CPU generator is drawn from."""
    _, keys, *rest = np.random.get_state()
    return random.getstate(), np.asarray(keys).tobytes(), *rest, torch.get_rng_state().numpy().tobytes()


@contextmanager
def kept(holder: Any = None) -> Iterator[None]:
    """Restores Python's, numpy's and torch's CPU generators afterwards, and the generators in ``holder``."""
    restores = [_restore_of(each) for each in (random, np.random, torch.default_generator, *held_by(holder))]
    try:
        yield
    finally:
        for restore_one in restores:
            restore_one()


_Generator = random.Random | np.random.Generator | np.random.RandomState | torch.Generator
_MOST_OBJECTS, _MOST_ENTRIES = 10_000, 100
"""Maximum number of objects searched for generators, and of entries of each container (a dataset may hold millions)."""


def held_by(holder: Any) -> list[_Generator]:
    """Returns the generators that an object holds: in attributes, lists, tuples and dicts, at any depth."""
    found: list[_Generator] = []
    seen: set[int] = set()
    waiting = deque([holder])
    while waiting and len(seen) < _MOST_OBJECTS:
        each = waiting.popleft()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, _Generator):
            found.append(each)
        elif isinstance(each, Mapping):
            waiting.extend(islice(each.values(), _MOST_ENTRIES))
        elif isinstance(each, (list, tuple)):
            waiting.extend(islice(each, _MOST_ENTRIES))
        elif isinstance(attributes := getattr(each, "__dict__", None), dict) and not isinstance(each, torch.Tensor):
            waiting.extend(attributes.values())
    return found


def _restore_of(generator: Any) -> Callable[[], None]:
    """Returns a function that restores the present state of a generator, or of a module with one."""
    if hasattr(generator, "getstate"):
        return partial(generator.setstate, generator.getstate())
    if isinstance(generator, np.random.Generator):
        return partial(setattr, generator.bit_generator, "state", copy.deepcopy(generator.bit_generator.state))
    return partial(generator.set_state, generator.get_state())


def seed_for_sample(seed: int) -> None:
    """Seeds Python, numpy and torch's CPU generator for one sample."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    # torch.manual_seed would also seed the GPUs, and dropout there would repeat with each sample.
    torch.default_generator.manual_seed(seed)
