"""Simulated CUDA cards below a torch that has no CUDA of its own.

`preload` before ``import torch``, `install` after it; ``sitecustomize`` beside this package does both. From then on
``torch.device("cuda")``, ``torch.cuda``, autograd, autocast, Lightning and DDP are the real ones, on cards whose
memory, streams and time the compiled `driver` simulates. FAKE_CUDA_* say what the cards are like: see README.md.
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
"""The compiled driver once `install` has been called: ``violations()``, ``counts()``, ``busy_ns(card, from, to)``."""


_library: Path | None = None
"""What is loaded: its sources may be changed while copies of this process start."""


def preload() -> None:
    """To be called before torch is imported, which asks once and for all for the hooks of a CUDA library."""
    global _library  # noqa: PLW0603  one machine a process
    _library = compiled()
    ctypes.CDLL(str(_library))


def uuid(card: int) -> str:
    """Of a card by the machine's numbers, as CUDA_VISIBLE_DEVICES and the simulated NVML have it."""
    return f"GPU-aaaa1111-0000-0000-0000-{card + 1:012d}"


def visible_cards() -> list[int]:
    """The machine's cards that CUDA_VISIBLE_DEVICES leaves, in its order; as CUDA, up to the first that is none."""
    there = range(int(os.environ.get("FAKE_CUDA_DEVICES", "0")))
    asked = os.environ.get("CUDA_VISIBLE_DEVICES")
    if asked is None:
        return list(there)
    visible: list[int] = []
    for word in (word.strip() for word in asked.split(",")):
        if word.startswith("GPU-"):  # the start of one is enough
            named = [card for card in there if uuid(card).startswith(word)]
        else:
            named = [card for card in there if word == str(card)]
        if len(named) != 1 or named[0] in visible:
            break
        visible += named
    return visible


def install() -> None:
    """Give this process its cards.

    Raises:
        RuntimeError: torch asked for its CUDA hooks before `preload`.
    """
    global driver  # noqa: PLW0603  one machine a process
    if driver is not None:
        return
    spec = importlib.util.spec_from_file_location("fake_cuda_driver", _library or compiled())
    assert spec is not None
    assert spec.loader is not None
    driver = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(driver)
    cards = visible_cards()
    num_cards = int(os.environ["FAKE_CUDA_DEVICES"])
    total_bytes = _mib("MIB", 1024)
    driver.set_up(
        cards=cards,
        machine_cards=num_cards,
        total_bytes=total_bytes,
        context_bytes=_mib("CONTEXT_MIB", 0),
        others_bytes=_mib("OTHERS_MIB", 0),
        slowdown=_number("SLOWDOWN", 1),
        kernel_us=_number("KERNEL_US", 0),
        launch_us=_number("LAUNCH_US", 0),
        copy_gbps=_number("COPY_GBPS", 0),
        pageable_gbps=_number("PAGEABLE_GBPS", 0),
        tflops=_number("TFLOPS", 0),
        tensor_tflops=_number("TENSOR_TFLOPS", 0),
        dram_gbps=_number("DRAM_GBPS", 0),
        sms=num_sms(),
        computes=computes(),
        capability_major=capability()[0],
        **throttling(os.environ.get("FAKE_CUDA_THROTTLE", "")),
        strict=os.environ.get("FAKE_CUDA_STRICT") == "1",
        lost_after=lost_after(os.environ.get("FAKE_CUDA_LOST_AFTER", ""), num_cards),
        state_path=os.environ.get("FAKE_CUDA_STATE", ""),
    )
    atexit.register(driver.shut_down)

    from fake_cuda import functions, nccl, streams

    functions.fill_in(driver, cards, total_bytes)
    streams.fill_in(driver)
    nccl.fill_in(driver)
    if report := os.environ.get("FAKE_CUDA_REPORT"):
        atexit.register(_report, driver, len(cards), Path(report))


def lost_after(text: str, num_cards: int) -> list[int]:
    """Launches after which each of the machine's cards is lost, -1 = never.

    Args:
        text: FAKE_CUDA_LOST_AFTER: ``1000`` for every card, or ``1:1000,3:0`` by card.
        num_cards: of the machine.
    """
    if text.isdigit():
        return [int(text)] * num_cards
    launches = [-1] * num_cards
    for word in filter(None, text.split(",")):
        card, _, num = word.partition(":")
        launches[int(card)] = int(num)
    return launches


def throttling(text: str) -> dict[str, float | bool]:
    """What the driver is told.

    Args:
        text: FAKE_CUDA_THROTTLE: ``10:0.5:heat``; busy seconds, share of the clock that stays, ``heat`` or ``power``.
    """
    after_s, share, reason = text.split(":") if text else ("-1", "1", "power")
    if reason not in {"heat", "power"} or not 0 < float(share) <= 1:
        raise ValueError(f"FAKE_CUDA_THROTTLE={text}: not like 10:0.5:heat or 10:0.5:power")
    return {
        "throttle_after_s": float(after_s),
        "throttle_clock": float(share),
        "throttles_by_heat": reason == "heat",
    }


def num_sms() -> int:
    """Multiprocessors of a card."""
    return int(_number("SMS", 32 if _number("TFLOPS", 0) else 8))


def computes() -> bool:
    """Whether kernels compute.

    Raises:
        ValueError: they don't, and nothing says how long they would take.
    """
    if _number("COMPUTES", 1):
        return True
    if not _number("TFLOPS", 0):
        raise ValueError("FAKE_CUDA_COMPUTES=0 needs FAKE_CUDA_TFLOPS: kernels that don't compute take no time")
    return False


def capability() -> tuple[int, int]:
    """Compute capability of a card."""
    major, _, minor = os.environ.get("FAKE_CUDA_CAPABILITY", "9.0").partition(".")
    return int(major), int(minor)


def _number(name: str, default: float) -> float:
    return float(os.environ.get(f"FAKE_CUDA_{name}", default))


def _mib(name: str, default: int) -> int:
    return int(os.environ.get(f"FAKE_CUDA_{name}", default)) << 20


def _report(driver: ModuleType, num_cards: int, path: Path) -> None:
    """What this process did, as a line of JSON; several processes may write at once."""
    seen = {
        "pid": os.getpid(),
        "rank": int(os.environ.get("LOCAL_RANK", "0")),
        "contexts": [card for card in range(num_cards) if driver.has_context(card)],
        "violations": driver.violations(),
        **driver.counts(),
    }
    with path.open("a") as file:
        file.write(json.dumps(seen) + "\n")
