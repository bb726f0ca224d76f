"""A training of milliseconds whose code fails as planted. `PLANTED` lists places, counts and actions.

``PLANTED="step:10:sigterm; save:3:full"``: at optimizer step 10 the process sends itself SIGTERM; the third save of a
checkpoint finds the disk full. Each fault fires once in a folder, however often the training is resumed there. With
``!`` behind the count it fires each time, with ``*`` for the count at every call. Prefixes of an action: ``worker_``
(only in a loader's worker process), ``rank0_`` and ``rank1_`` (only in that rank), ``then_`` (only after the fault
listed before it has fired, since workers read ahead of the step). The module is imported by name, as a user's code is.
"""

import os
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
import torch
from durable import Durable
from torch import Tensor, nn

from wellfed.contract import Datasets, LossOutput

SAMPLES, BATCH = 64, 8
_SEEN: Counter[str] = Counter()
_MAIN = os.getpid()
_SIGNALS = {"sigterm", "sigint", "sighup", "sigusr1", "sigkill", "sigsegv"}
_OF_DATA = ("nan", "inf", "vector", "shape", "key", "class")
"""Actions that the place itself carries out."""


def planted(place: str, count: int | None = None) -> str:
    """Does what is due at this place; returns the name of the action, empty if none is due.

    Args:
        count: number of the call; None counts the calls of this process.
    """
    if count is None:
        _SEEN[place] += 1
        count = _SEEN[place]
    for number, fault in enumerate(filter(None, os.environ.get("PLANTED", "").split(";"))):
        where, when, action = fault.strip().split(":")
        if where != place or when.rstrip("!") not in ("*", str(count)):
            continue
        if action.startswith("then_") and not _fired(number - 1).exists():
            continue
        action = action.removeprefix("then_")
        if action.startswith("worker_") and os.getpid() == _MAIN:
            continue
        if action[:6] in ("rank0_", "rank1_") and os.environ.get("LOCAL_RANK", "0") != action[4]:
            continue
        if when[-1] in "*!" or _is_first(number):
            action = action.removeprefix("worker_").removeprefix("rank0_").removeprefix("rank1_")
            _act(action)
            return action
    return ""


def _fired(number: int) -> Path:
    """Returns the file that exists once a fault has fired."""
    return Path(os.environ["PLANTED_FOLDER"]) / f"fired-{number}"


def _is_first(number: int) -> bool:
    try:
        _fired(number).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _act(action: str) -> None:
    if action in _SIGNALS:
        os.kill(os.getpid(), signal.Signals[action.upper()])
    elif action == "raise":
        raise RuntimeError("planted failure")
    elif action == "oserror":
        raise OSError(5, "Input/output error", "planted.bin")
    elif action == "memory":
        raise MemoryError
    elif action == "oom":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    elif action == "interrupt":
        raise KeyboardInterrupt
    elif action == "recursion":
        _act(action)
    elif action.startswith("exit"):
        os._exit(int(action.removeprefix("exit")))
    elif action == "sysexit":
        sys.exit(7)
    elif action == "hang":
        time.sleep(3600)
    elif action == "pause":
        time.sleep(0.15)
    elif action == "stop":  # as Ctrl-Z or a suspended container does, for two seconds
        subprocess.Popen(["sh", "-c", f"sleep 2; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    elif action.startswith("clock"):
        _set_clock(float(action.removeprefix("clock")))
    elif action == "leak":
        _leak()
    elif action == "handles":
        _use_all_handles()
    elif action == "close":
        while _HANDLES:
            os.close(_HANDLES.pop())
    elif action == "wandb":  # its service, a process beside this one
        for child in psutil.Process().children(recursive=True):
            if "wandb" in child.name():
                child.kill()
    elif action == "full":  # any file that grows beyond 4 KiB fails, as on a full disk; SIGXFSZ would kill
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    elif action == "room":
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    elif action.startswith("powercut"):
        Durable.cut_power(keeps_names=action != "powercut-names")
    elif action not in _OF_DATA:
        raise ValueError(f"planted action {action!r}")


def _set_clock(by_s: float) -> None:
    """Sets the wall clock of Python code that calls ``time.time``; the machine's own clock is not touched."""
    own = time.time
    time.time = lambda: own() + by_s
    own_ns = time.time_ns
    time.time_ns = lambda: own_ns() + int(by_s * 1e9)


def _leak() -> None:
    """Takes memory until none is left within 256 MiB more than now."""
    used = psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, used + 2**28))
    kept = []
    while True:
        kept.append(bytearray(2**24))


_HANDLES: list[int] = []


def _use_all_handles() -> None:
    """Leaves no free file descriptor."""
    try:
        while True:
            _HANDLES.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        return


if any(word in os.environ.get("PLANTED", "") for word in ("powercut", "rename_")):
    Durable.record(lambda name: planted(f"rename_{name}"))


class Points:
    """Pairs of a vector [4] and a class out of 3."""

    def __init__(self, split: str, samples: int = SAMPLES) -> None:
        drawn = torch.Generator().manual_seed(len(split))
        self.split, self.inputs = split, torch.randn(samples, 4, generator=drawn)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> dict[str, Any]:
        action = planted(f"{self.split}_sample", index)
        x, label = self.inputs[index], int(self.inputs[index].argmax()) % 3
        if action == "nan":
            x = x * float("nan")
        elif action == "shape":
            x = x[:3]
        elif action == "class":
            label = 7
        sample: dict[str, Any] = {"x": x, "label": label}
        if os.environ.get("PLANTED_TEXT"):
            sample["text"] = f"sample {index}"
        return sample


def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Stacks tensors; texts stay a list. ``PLANTED_TEXT=uneven`` adds a list of another length than the batch's."""
    planted("collate")
    batch = torch.utils.data.default_collate([{"x": one["x"], "label": one["label"]} for one in samples])
    if "text" in samples[0]:
        batch["text"] = [one["text"] for one in samples]
    if os.environ.get("PLANTED_TEXT") == "uneven":
        batch["numbers"] = list(range(len(samples) + 3))
    return batch


def datasets(samples: int = SAMPLES, val: int = 16, test: int = 16) -> Datasets:
    """Returns training, validation and test data."""
    planted("data")
    return Datasets(Points("train", samples), Points("val", val), Points("test", test), collate=collate)


class Classifier(nn.Module):
    """A linear layer with layer norm. Dropout draws numbers, so resuming without the generator's state would show."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        planted("model")
        self.hidden, self.norm = nn.Linear(4, width), nn.LayerNorm(width)
        self.drop, self.out = nn.Dropout(0.1), nn.Linear(width, 3)

    def forward(self, batch: dict[str, Any]) -> Tensor:
        return self.out(self.drop(self.norm(self.hidden(batch["x"])).relu()))

    def loss(self, batch: dict[str, Any]) -> LossOutput:
        action = planted("loss", Watch.step) if self.training else planted("evaluate")
        if action == "key":
            batch["labels"]
        loss = nn.functional.cross_entropy(self.forward(batch), batch["label"], reduction="none")
        if action == "vector":
            return LossOutput(loss)
        return LossOutput(loss.mean() * float(action) if action in ("nan", "inf") else loss.mean())


class Watch(pl.Callback):
    """Calls `planted` around steps, epochs and checkpoints."""

    step = 0

    def on_fit_start(self, trainer: pl.Trainer, module: Any) -> None:
        planted("fit")

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        Watch.step = trainer.global_step + 1

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        planted("step", trainer.global_step)

    def on_train_epoch_end(self, trainer: pl.Trainer, module: Any) -> None:
        planted("epoch", trainer.current_epoch + 1)

    def on_validation_start(self, trainer: pl.Trainer, module: Any) -> None:
        if not trainer.sanity_checking:
            planted("validation")

    def on_test_start(self, trainer: pl.Trainer, module: Any) -> None:
        planted("test")

    def on_save_checkpoint(self, trainer: pl.Trainer, module: Any, checkpoint: dict[str, Any]) -> None:
        planted("save")
