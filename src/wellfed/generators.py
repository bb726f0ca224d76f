"""Seeds, saves and restores all random generators that a model may draw from."""

from __future__ import annotations

import copy
import os
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
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
    """Restores the result of `state`: the state of ``device``, None = those of all GPUs."""
    torch.set_rng_state(saved["torch"].cpu())
    cuda = [each.cpu() for each in saved["cuda"]]
    if cuda and torch.cuda.is_available():
        if device is None:
            torch.cuda.set_rng_state_all(cuda)
        elif device.type == "cuda":
            torch.cuda.set_rng_state(cuda[0], device)
    name, keys, place, has_gauss, gauss = saved["numpy"]
    np.random.set_state((name, keys.cpu().numpy().astype(np.uint32), place, has_gauss, gauss))
    version, numbers, gauss_next = saved["python"]
    random.setstate((version, tuple(numbers), gauss_next))


class GeneratorStates:
    """States of torch's generators when a step began, to go back to within this process.

    Those of numpy and Python are left out: reading both takes 50 us, and a loss rarely draws from them.
    """

    def __init__(self, device: torch.device) -> None:
        """``device``: the only GPU whose state is saved."""
        self._device = device if device.type == "cuda" else None
        self._torch: torch.Tensor | None = None
        self._cuda: torch.Tensor | None = None

    def take(self) -> None:
        """Saves the states; does not synchronize with the device."""
        self._torch = torch.default_generator.get_state()
        if self._device is not None:
            self._cuda = torch.cuda.get_rng_state(self._device)

    def restore(self) -> None:
        """Goes back to the latest `take`."""
        assert self._torch is not None
        torch.default_generator.set_state(self._torch)
        if self._cuda is not None and self._device is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)


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
