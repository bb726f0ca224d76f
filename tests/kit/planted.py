"""A workload that goes wrong on request, in each way that a sweep has to survive: ``workload.model.fault=<name>``."""

import ctypes
import os
import signal
import sys
import time

import torch
from torch import Tensor, nn

from wellfed.contract import Datasets, LossOutput

_FIRST_BAD_CALL = 9
NUM_ROWS = 7


class Points:
    """Numbers between 0 and 1; to read one by itself takes `read_s` seconds."""

    def __init__(self, num: int, read_s: float = 0.0) -> None:
        self.num, self.read_s = num, read_s

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if self.read_s:
            time.sleep(self.read_s)
        return {"x": torch.tensor([index / self.num])}


class Fetching(Points):
    """The same, many at a time, at no price."""

    def fetch(self, indices: Tensor, rng: object) -> dict[str, Tensor]:
        return {"x": indices[:, None] / self.num}


def datasets(num: int = 4096, fetch: bool = True, read_s: float = 0.0) -> Datasets:
    """A training split alone."""
    return Datasets(train=(Fetching if fetch else Points)(num, read_s))


def crash() -> None:
    """Crashes the process, as native code does."""
    ctypes.string_at(0)


def run_out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def fail() -> None:
    raise RuntimeError("planted: step went wrong")


def hang() -> None:
    while True:
        time.sleep(0.01)


IN_A_STEP = {
    "raise": fail,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "term": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "segv": crash,
    "exit": lambda: sys.exit(7),
    "leave": lambda: os._exit(0),
    "oom": run_out_of_memory,
    "hang": hang,
    "slow": lambda: time.sleep(0.05),
    "none": lambda: None,
}


def refuse() -> None:
    raise ValueError("no such layer: 7")


IN_BUILDING = {"build": refuse, "build_crash": crash, "build_exit": lambda: sys.exit(4)}


class Line(nn.Module):
    """A line through the points; its fault comes after some good steps, or before there is a model."""

    def __init__(self, fault: str = "none") -> None:
        super().__init__()
        self.line = nn.Linear(1, 1)
        self.fault, self.calls = fault, 0
        if fault in IN_BUILDING:
            IN_BUILDING[fault]()
        elif fault not in IN_A_STEP:
            raise ValueError(f"no fault {fault}")

    def loss(self, batch: dict[str, Tensor]) -> LossOutput:
        self.calls += 1
        if self.calls >= _FIRST_BAD_CALL and self.training:
            IN_A_STEP[self.fault]()
        return LossOutput(self.line(batch["x"]).square().mean())
