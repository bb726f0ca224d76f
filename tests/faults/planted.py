"""Offers a training of milliseconds whose code fails as planted: `PLANTED` names places, counts and actions.

``PLANTED="step:10:sigterm; save:3:full"``: at optimizer step 10 the process sends itself SIGTERM; the third save of a
checkpoint finds the disk full. Each fires once in a folder, however often the training is resumed there; with ``!``
behind the count it fires each time, with ``*`` for the count at every call. ``worker_`` before an action: in a loader's
worker process alone. ``then_`` before it: only after the fault listed before it has fired, since workers read ahead of
the step. Imported by name, as a user's code is.
"""

import os
import resource
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
import torch
from torch import Tensor, nn

from wellfed.contract import Datasets, LossOutput

SAMPLES, BATCH = 64, 8
_SEEN: Counter[str] = Counter()
_MAIN = os.getpid()
_SIGNALS = {"sigterm", "sigint", "sighup", "sigusr1", "sigkill", "sigsegv"}


def planted(place: str, count: int | None = None) -> str:
    """Does what is due at this place; the name of the action, empty where none is due.

    Args:
        count: which time it is; None counts the calls of this process.
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
        if when[-1] in "*!" or _is_first(number):
            _act(action.removeprefix("worker_"))
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
    elif action == "wandb":  # its service, a process beside this one
        for child in psutil.Process().children(recursive=True):
            if "wandb" in child.name():
                child.kill()
    elif action == "full":  # whatever file grows beyond 4 KiB, as on a full disk; SIGXFSZ would kill
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    elif action == "room":
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    elif action not in ("nan", "inf", "vector", "shape", "key", "class"):
        raise ValueError(f"planted action {action!r}")


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
    """Stacks; texts stay a list. With ``PLANTED_TEXT=uneven`` there is a list of another length than the batch's."""
    planted("collate")
    batch = torch.utils.data.default_collate([{"x": one["x"], "label": one["label"]} for one in samples])
    if "text" in samples[0]:
        batch["text"] = [one["text"] for one in samples]
    if os.environ.get("PLANTED_TEXT") == "uneven":
        batch["numbers"] = list(range(len(samples) + 3))
    return batch


def datasets(samples: int = SAMPLES, val: int = 16, test: int = 16) -> Datasets:
    """Train, validation and test."""
    planted("data")
    return Datasets(Points("train", samples), Points("val", val), Points("test", test), collate=collate)


class Classifier(nn.Module):
    """A linear layer of batch statistics; dropout draws, so that resuming without its generator would show."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
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
