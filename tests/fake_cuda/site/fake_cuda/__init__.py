"""Simulated CUDA cards below a torch that has no CUDA of its own.

`preload` before ``import torch``, `install` after it; ``sitecustomize`` beside this package does both. From then on
``torch.device("cuda")``, ``torch.cuda``, autograd, autocast, Lightning and DDP are the real ones, on cards whose memory,
streams and time the compiled `driver` simulates. Variables of the environment say what the cards are like: see README.md.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib.util
import json
import os
from pathlib import Path
from types import ModuleType

from fake_cuda.build import compiled

driver: ModuleType | None = None
"""The compiled driver once `install` has been called: ``violations()``, ``counts()``, ``has_context(card)``."""


def preload() -> None:
    """To be called before torch is imported, which asks once and for all for the hooks of a CUDA library."""
    ctypes.CDLL(str(compiled()))


def visible_cards() -> int:
    """Cards that FAKE_CUDA_DEVICES gives and CUDA_VISIBLE_DEVICES leaves; as CUDA, up to the first that is none."""
    there = int(os.environ.get("FAKE_CUDA_DEVICES", "0"))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return there
    found = 0
    for word in visible.split(","):
        if not word.strip().isdigit() or int(word) >= there:
            break
        found += 1
    return found


def install() -> None:
    """Give this process its cards.

    Raises:
        RuntimeError: torch asked for its CUDA hooks before `preload`.
    """
    global driver  # noqa: PLW0603  one machine a process
    if driver is not None:
        return
    spec = importlib.util.spec_from_file_location("fake_cuda_driver", compiled())
    assert spec is not None
    assert spec.loader is not None
    driver = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(driver)
    cards, total = visible_cards(), int(os.environ.get("FAKE_CUDA_MIB", "1024")) << 20
    figures = (float(os.environ.get(f"FAKE_CUDA_{name}", given)) for name, given in _FIGURES.items())
    driver.set_up(cards, total, *figures, os.environ.get("FAKE_CUDA_STRICT") == "1")

    from fake_cuda import functions, nccl, streams

    functions.fill_in(driver, cards, total)
    streams.fill_in(driver)
    nccl.fill_in(driver)
    if report := os.environ.get("FAKE_CUDA_REPORT"):
        atexit.register(_report, driver, cards, Path(report))


_FIGURES = {"SLOWDOWN": "1", "KERNEL_US": "0", "COPY_GBPS": "0"}


def _report(driver: ModuleType, cards: int, path: Path) -> None:
    """What this process did, as a line of JSON; several processes may write at once."""
    seen = {
        "pid": os.getpid(),
        "rank": int(os.environ.get("LOCAL_RANK", "0")),
        "contexts": [card for card in range(cards) if driver.has_context(card)],
        "violations": driver.violations(),
        **driver.counts(),
    }
    with path.open("a") as file:
        file.write(json.dumps(seen) + "\n")
