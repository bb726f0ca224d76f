"""Data, model and work beside the steps, of which the scripts of `benchmarks/peers_diagnosis.py` are made.

Most models rest in their passes, so that a step takes as long on a busy machine. On a CPU this is a stand-in for a
device; on a GPU the GPU is busy for as long. The work of a fault is real where that is what costs (decoding,
checkpoints, garbage), and a rest where something else is waited for.
"""

from __future__ import annotations

import gc
import itertools
import re
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate

CHECKPOINT = "planted.pt"
GPU_CYCLES_A_MS = 1.7e6
"""Cycles of a kernel that only waits; GPUs run at 1.4 to 2.5 GHz."""


@dataclass
class Settings:
    """Work of a script. Without a fault, all times except the model's are zero."""

    steps: int = 50
    """Steps of the optimizer."""
    batch: int = 16
    features: int = 16
    width: int = 16
    layers: int = 1
    tensors: int = 0
    """Further small parameters, which the optimizer updates one by one."""
    rest_ms: float = 12.0
    """Rest in the forward pass, and in the backward pass."""
    build_ms: float = 0.0
    """Time to build a sample."""
    build: str = "rest"
    """``rest``: it waits for something else; ``work``: it takes CPU time."""
    collate_ms: float = 0.0
    slow_every: int = 0
    """One sample in so many is slow; 0 = none."""
    slow_ms: float = 0.0
    is_locked: bool = False
    """Whether workers read one after the other."""
    workers: int = 0
    persistent: bool = True
    prefetch: int | None = None
    pinned: bool = False
    worker_start_ms: float = 0.0
    epoch_steps: int = 0
    """Batches of an epoch; 0 = all in one."""
    epoch_end_ms: float = 0.0
    accumulate: int = 1
    augment_ms: float = 0.0
    loss_ms: float = 0.0
    gradient_ms: float = 0.0
    schedule_ms: float = 0.0
    print_ms: float = 0.0
    log_ms: float = 0.0
    checkpoint_every: int = 0
    state_mib: float = 0.0
    """Size of a buffer of the model, which its checkpoints hold."""
    validate_every: int = 0
    garbage: int = 0
    """Objects that each collection of garbage goes through; 0 = no collection."""
    second_passes: int = 0
    """Passes over each batch after its step, for an accuracy."""
    grows: int = 0
    """Values that each step adds to the list in the loss."""
    first_ms: float = 0.0

    @property
    def batches(self) -> int:
        """Batches of a whole training."""
        return self.steps * self.accumulate

    @property
    def epochs(self) -> int:
        """Passes over the data."""
        return -(-self.batches // self.epoch_steps) if self.epoch_steps else 1


def changed(settings: Settings, advice: str) -> Settings:
    """Returns the settings with typed advice: ``DataLoader(num_workers=3)``, ``validation every 100 steps``."""
    values: dict[str, Any] = {}
    names = {
        "num_workers": "workers",
        "persistent_workers": "persistent",
        "prefetch_factor": "prefetch",
        "pin_memory": "pinned",
    }
    for name, value in re.findall(r"(\w+)=(\w+)", "".join(re.findall(r"DataLoader\((.*?)\)", advice))):
        if name in names:
            values[names[name]] = {"True": True, "False": False, "None": None}.get(value, value)
            if isinstance(values[names[name]], str):
                values[names[name]] = int(value)
    for what, name in (("validation", "validate_every"), (r"torch\.save", "checkpoint_every")):
        if found := re.search(rf"{what} every (\d+) steps", advice):
            values[name] = int(found[1])
    return Settings(**{**vars(settings), **values})


def work(ms: float) -> None:
    """Takes so many milliseconds of CPU time."""
    until_s = time.thread_time() + ms / 1e3
    while time.thread_time() < until_s:
        pass


def rest(ms: float) -> None:
    """Waits so many milliseconds, as for a network."""
    if ms:
        time.sleep(ms / 1e3)


class Samples(Dataset):
    """Samples that take time to build."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.lock = torch.multiprocessing.Lock() if settings.is_locked else None
        self.number = (settings.epoch_steps or settings.batches) * settings.batch

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        settings = self.settings
        if self.lock is not None:
            with self.lock:
                rest(settings.build_ms)
        elif settings.build == "work":
            work(settings.build_ms)
        else:
            rest(settings.build_ms)
        if settings.slow_every and index % settings.slow_every == settings.slow_every - 1:
            rest(settings.slow_ms)
        return torch.ones(settings.features), torch.zeros(1)


class Collate:
    """Joins samples, which takes CPU time."""

    def __init__(self, ms: float) -> None:
        self.ms = ms

    def __call__(self, samples: list[Any]) -> Any:
        work(self.ms)
        return default_collate(samples)


class WorkerStart:
    """Start of a worker, which takes its time."""

    def __init__(self, ms: float) -> None:
        self.ms = ms

    def __call__(self, number: int) -> None:
        torch.set_num_threads(1)
        rest(self.ms)


def loader_of(settings: Settings) -> DataLoader[Any]:
    """Returns the DataLoader of the training."""
    of_workers: dict[str, Any] = {}
    if settings.workers:
        of_workers = {"persistent_workers": settings.persistent, "prefetch_factor": settings.prefetch}
        of_workers["worker_init_fn"] = WorkerStart(settings.worker_start_ms)
    return DataLoader(
        Samples(settings),
        batch_size=settings.batch,
        num_workers=settings.workers,
        collate_fn=Collate(settings.collate_ms) if settings.collate_ms else None,
        pin_memory=settings.pinned,
        **of_workers,
    )


def validation_loader(settings: Settings) -> DataLoader[Any]:
    """Returns a DataLoader of 10 batches that cost nothing to build."""
    quick = Settings(steps=10, batch=settings.batch, features=settings.features)
    return DataLoader(Samples(quick), batch_size=settings.batch)


class Resting(torch.autograd.Function):
    """Rest in the forward and in the backward pass; on a GPU it is the GPU that is busy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ms: float) -> Tensor:
        ctx.ms = ms
        occupy(x.device, ms)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        occupy(gradients[0].device, ctx.ms)
        return gradients[0], None


def occupy(device: torch.device, ms: float) -> None:
    """Waits on a CPU. Launches a kernel of about so many milliseconds on a GPU."""
    if device.type == "cuda":
        torch.cuda._sleep(int(ms * GPU_CYCLES_A_MS))
    else:
        rest(ms)


class Net(nn.Module):
    """Linear layers, and a rest."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        sizes = [settings.features, *[settings.width] * settings.layers]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))
        self.head = nn.Linear(sizes[-1], 1)
        self.tiny = nn.ParameterList(torch.zeros(4) for _ in range(settings.tensors))
        self.register_buffer("state", torch.zeros(int(settings.state_mib * 2**18)))
        self.rest_ms, self.first_ms = settings.rest_ms, settings.first_ms

    def forward(self, x: Tensor) -> Tensor:
        rest(self.first_ms)
        self.first_ms = 0.0
        if self.rest_ms:
            x = Resting.apply(x.requires_grad_() if torch.is_grad_enabled() else x, self.rest_ms)
        for layer in self.layers:
            x = torch.relu(layer(x))
        x = self.head(x)
        return x + torch.cat([*self.tiny]).sum() if len(self.tiny) else x


def optimizer_of(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """Returns an optimizer; with many small tensors, one that updates them one by one."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False if settings.tensors else None)


class SlowSchedule(torch.optim.lr_scheduler.LambdaLR):
    """Schedule whose learning rate takes long to compute."""

    def __init__(self, optimizer: torch.optim.Optimizer, ms: float) -> None:
        self.ms = 0.0
        super().__init__(optimizer, lambda step: 1.0)
        self.ms = ms

    def get_lr(self) -> list[Any]:
        work(self.ms)
        return super().get_lr()


class Loss:
    """Mean square, with what a fault adds."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.past = settings, list[Tensor]()

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        work(self.settings.loss_ms)
        loss = nn.functional.mse_loss(output, target)
        if self.settings.grows:
            self.past += [loss.detach()] * self.settings.grows
            for past in self.past:
                loss = loss + 0.0 * (loss - past)
        return loss


class AfterSteps:
    """What a script does after each step of its optimizer."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.objects = [[number] for number in range(settings.garbage)]

    def __call__(self, model: nn.Module, x: Tensor) -> None:
        settings = self.settings
        with torch.no_grad():
            for _ in range(settings.second_passes):
                model(x.detach())
        if settings.print_ms:
            until_s = time.thread_time() + settings.print_ms / 1e3
            while time.thread_time() < until_s:
                print([parameter.tolist() for parameter in model.parameters()], flush=True)
        rest(settings.log_ms)
        if settings.garbage:
            gc.collect()
