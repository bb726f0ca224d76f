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
import time
from collections import Counter
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from wellfed.contract import Datasets, LossOutput
from wellfed.train.loop.callbacks import Callback

SAMPLES, BATCH = 64, 8
_SEEN: Counter[str] = Counter()
_MAIN = os.getpid()
_SIGNALS = {"sigterm", "sigint", "sigkill"}
_OF_DATA = ("nan", "inf")
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
    elif action == "memory":
        raise MemoryError
    elif action == "oom":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    elif action == "pause":
        time.sleep(0.15)
    elif action == "full":  # any file that grows beyond 4 KiB fails, as on a full disk; SIGXFSZ would kill
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    elif action == "room":
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    elif action not in _OF_DATA:
        raise ValueError(f"planted action {action!r}")


if "rename_" in os.environ.get("PLANTED", ""):
    _own_replace = os.replace

    def _replace(source: Any, target: Any, **more: Any) -> None:
        planted(f"rename_{Path(target).name}")
        _own_replace(source, target, **more)

    os.replace = _replace


class Points:
    """Pairs of a vector [4] and a class out of 3."""

    def __init__(self, split: str, samples: int = SAMPLES) -> None:
        drawn = torch.Generator().manual_seed(len(split))
        self.split, self.inputs = split, torch.randn(samples, 4, generator=drawn)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.split == "test" and Watch.is_over and index == 0:
            planted("test")
        action = planted(f"{self.split}_sample", index)
        x, label = self.inputs[index], int(self.inputs[index].argmax()) % 3
        if action == "nan":
            x = x * float("nan")
        return {"x": x, "label": label}


def datasets(samples: int = SAMPLES, val: int = 16, test: int = 16) -> Datasets:
    """Returns training, validation and test data."""
    planted("data")
    return Datasets(Points("train", samples), Points("val", val), Points("test", test))


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
        loss = nn.functional.cross_entropy(self.forward(batch), batch["label"], reduction="none")
        return LossOutput(loss.mean() * float(action) if action in ("nan", "inf") else loss.mean())


class Watch(Callback):
    """Calls `planted` around steps, epochs and checkpoints of a plain model."""

    step = 0
    """Number of the step that is made; 0 outside of a training."""
    is_over = False

    def __init__(self) -> None:
        self._epochs, self._has_stepped = 0, False

    def begin(self, whole: nn.Module) -> None:
        Watch.step, Watch.is_over = 1, False
        planted("fit")

    def load_state_dict(self, state: Any) -> None:
        Watch.step, self._epochs = state["step"], state["epochs"]

    def stepped(self, step: int) -> None:
        Watch.step, self._has_stepped = step + 1, True
        planted("step", step)

    def looked(self, metrics: Any) -> None:
        self._epochs += 1
        planted("epoch", self._epochs)

    def end(self) -> None:
        Watch.step, Watch.is_over = 0, True

    def state_dict(self) -> dict[str, Any]:
        if self._has_stepped:  # else it is the check before training
            planted("save")
        return {"step": Watch.step, "epochs": self._epochs}


class GuestWatch(pl.Callback):
    """Calls `planted` around steps, epochs and checkpoints of a LightningModule."""

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
