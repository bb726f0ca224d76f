"""Seeds, saves and restores all random generators that a model may draw from."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """Seed Python, numpy and torch for this process, and by Lightning's variables the processes that it starts."""
    seed %= 2**32
    os.environ["PL_GLOBAL_SEED"], os.environ["PL_SEED_WORKERS"] = str(seed), "0"
    seed_all(seed)


def seed_all(seed: int) -> None:
    """Seeds Python, numpy and torch, GPUs too, in this process alone."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def state(device: torch.device | None = None) -> dict[str, Any]:
    """Those of torch, numpy and Python, as values that a weights-only load accepts; does not wait for the device.

    Of CUDA that of ``device`` alone; None = all devices, where CUDA is in use.
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
    """Put back what `state` gave for the same ``device``; those of CUDA only where there are as many devices."""
    torch.set_rng_state(saved["torch"].cpu())
    cuda = [each.cpu() for each in saved["cuda"]]
    if cuda and torch.cuda.is_available():
        if device is not None:
            torch.cuda.set_rng_state(cuda[0], device)
        elif len(cuda) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(cuda)
    name, keys, place, has_gauss, gauss = saved["numpy"]
    np.random.set_state((name, keys.cpu().numpy().astype(np.uint32), place, has_gauss, gauss))
    version, numbers, gauss_next = saved["python"]
    random.setstate((version, tuple(numbers), gauss_next))


def numbers() -> tuple[Any, ...]:
    """What differs once Python's, numpy's or torch's generator (the CPU's) has been drawn from."""
    _, keys, *rest = np.random.get_state()
    return random.getstate(), np.asarray(keys).tobytes(), *rest, torch.get_rng_state().numpy().tobytes()


@contextmanager
def kept() -> Iterator[None]:
    """Afterwards Python's, numpy's and torch's generators (the CPU's) are as they were."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def seed_for_sample(seed: int) -> None:
    """Seed those of Python, numpy and torch for one sample, for data that draws from them."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    # Not torch.manual_seed: it seeds the GPUs too, and dropout there must not start again with each sample.
    torch.default_generator.manual_seed(seed)
