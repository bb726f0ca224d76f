"""Offers three small workloads with faults that can be planted in them, for `benchmarks/diagnosis.py`.

Delays are counted in steps: a step takes about ``step_ms`` where nothing is wrong, so ``build_steps=3`` is a batch that
one worker needs three steps for. On a CPU a model rests for most of a step, as a device would compute beside the CPU:
two cores are enough for the loader then.
"""

from __future__ import annotations

import io
import mmap
import multiprocessing
import os
import re
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, TensorDataset, default_collate

from wellfed.contract import Datasets, LossOutput
from wellfed.sample_rng import SampleRng

SIGNALS = "PLANTED_SIGNALS"
"""Names the folder in which a run says that its steps have begun and are over, as files ``begun`` and ``over``."""
CLASSES = 4
CORE_SIZE, CORE_MS = 256, 1.0
"""Size of square matrices, and approximate milliseconds of their product on a core."""
CARD_SIZE, CARD_MS = 128, 2.0
"""A smaller one takes a simulated card longer, which is to be far slower than the host that stands in for it."""
TIMED_PRODUCTS = 10
"""Products timed on a real card to find the number that take a step."""


class Samples:
    """Inputs and labels, sample by sample; building them can be made slow in several ways.

    Args:
        build_steps: what all samples of a batch take together, in steps.
        how: ``sleep`` as for a disk or a network, ``spin`` as for work of the CPU, ``threads`` for work of 8 threads
            in each process; ``lock``, a sleep while no other process may read; ``limit``, a store
            that serves one sample after the other to all who ask; ``jpeg``, a large picture is decoded for a crop of
            it; ``words``, text is cut into words in Python; ``nested``, a DataLoader is made for each sample.
        jitter: sigma of log-normal noise of a batch's time, whose mean stays.
        latency: the same of each sample's time.
        late, late_s: one sample in so many takes so long, drawn anew each time that it is read.
        wide: inputs are float64.
        heavy: one batch in eight takes eight times as long and the others nothing.
        cold_steps: beside it, where no process has read the sample before.
        slow_samples, slow_s: so many of the samples of the first epoch's first 100 batches take so long.
        open_s: what the first sample costs each worker process.
        dies_after: a worker dies of SIGKILL, once, when it has built so many batches.
    """

    def __init__(
        self,
        inputs: Tensor,
        labels: Tensor,
        *,
        batch: int,
        step_ms: float,
        build_steps: float = 0.0,
        how: str = "sleep",
        jitter: float = 0.0,
        latency: float = 0.0,
        late: int = 0,
        late_s: float = 0.0,
        wide: bool = False,
        heavy: bool = False,
        cold_steps: float = 0.0,
        slow_samples: int = 0,
        slow_s: float = 0.0,
        open_s: float = 0.0,
        dies_after: int = 0,
    ) -> None:
        self.inputs, self.labels = inputs, labels
        self.sample_s, self.cold_s = 1e-3 * step_ms * build_steps / batch, 1e-3 * step_ms * cold_steps / batch
        self.batch, self.how, self.jitter, self.heavy = batch, how, jitter, heavy
        self.slow_samples, self.slow_s, self.open_s, self.dies_after = slow_samples, slow_s, open_s, dies_after
        self.read, self.shared = mmap.mmap(-1, len(inputs)), mmap.mmap(-1, 1)  # of all that are forked
        self.maker, self.opened_by, self.built, self.factor = os.getpid(), 0, 0, 1.0
        self.owed_s, self.work = 0.0, torch.ones(2**17)
        self.latency, self.wide, self.late, self.late_s = latency, wide, late, late_s
        self.lock, self.served = multiprocessing.Lock(), mmap.mmap(-1, 8)
        self.jpeg = _jpeg() if how == "jpeg" else b""

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        in_worker = os.getpid() != self.maker
        if self.open_s and in_worker and self.opened_by != os.getpid():
            self.opened_by = os.getpid()
            time.sleep(self.open_s)
        if in_worker and self.dies_after and self.built == self.dies_after * self.batch and not self.shared[0]:
            self.shared[0] = 1
            os.kill(os.getpid(), signal.SIGKILL)
        takes_s = self.sample_s * self._factor()
        if self.latency:
            drawn = torch.Generator().manual_seed(self.built * 7919 + os.getpid())
            takes_s *= float(torch.exp(self.latency * torch.randn((), generator=drawn) - self.latency**2 / 2))
        if self.cold_s and not self.read[index]:
            self.read[index] = 1
            takes_s += self.cold_s
        self._spend(takes_s)
        if self.late:
            drawn = torch.Generator().manual_seed(self.built * 104729 + os.getpid())
            if int(torch.randint(self.late, (), generator=drawn)) == 0:
                time.sleep(self.late_s)
        if self.slow_samples and index * 31 % len(self) < self.slow_samples * len(self) // (100 * self.batch):
            time.sleep(self.slow_s)
        inputs = self.inputs[index]
        return {"inputs": inputs.double() if self.wide else inputs, "labels": self.labels[index]}

    def _factor(self) -> float:
        """The same for the samples of a batch."""
        self.built += 1
        if (self.built - 1) % self.batch == 0:
            drawn = torch.Generator().manual_seed(self.built * 1000 + os.getpid())
            if self.heavy:
                self.factor = 8.0 if torch.rand((), generator=drawn) < 1 / 8 else 0.0
            elif self.jitter:
                normal = float(torch.randn((), generator=drawn))
                self.factor = float(torch.tensor(self.jitter * normal - self.jitter**2 / 2).exp())
        return self.factor

    def _spend(self, takes_s: float) -> None:
        """Time that is due is spent a millisecond and more at once: shorter sleeps take longer than asked for."""
        self.owed_s += takes_s
        if self.owed_s < 1e-3:
            return
        if self.how in ("lock", "limit"):
            self._wait_in_turn()
            return
        now_s = time.perf_counter if self.how == "sleep" else time.thread_time  # a core that is shared does less
        began_s = now_s()
        while (left_s := self.owed_s - (now_s() - began_s)) > 0:
            if self.how == "sleep":
                time.sleep(left_s)
            else:
                self._work()
        self.owed_s = left_s

    def _work(self) -> None:
        """A little work of the kind that was asked for."""
        if self.how == "threads":
            torch.set_num_threads(8)
            self.work.mul_(1.0)
        elif self.how == "jpeg":
            np.asarray(Image.open(io.BytesIO(self.jpeg)).convert("RGB"))[:48, :48].copy()
        elif self.how == "words":
            re.findall(r"[a-z]+|[0-9]+", TEXT)
        elif self.how == "nested":
            next(iter(DataLoader(TensorDataset(self.inputs[:8]), batch_size=4)))

    def _wait_in_turn(self) -> None:
        """Sleeps as long as is due: with the lock in hand, or until the store has served those who asked before."""
        if self.how == "lock":
            with self.lock:
                time.sleep(self.owed_s)
        else:
            with self.lock:
                turn_s = max(time.monotonic(), *struct.unpack("d", self.served[:8])) + self.owed_s
                self.served[:8] = struct.pack("d", turn_s)
            time.sleep(max(0.0, turn_s - time.monotonic()))
        self.owed_s = 0.0


TEXT = "the step waits for 17 batches of 32 samples, " * 20
"""Text that a sample's tokenizer cuts."""


def _jpeg() -> bytes:
    """A picture of 1200 x 900, as a camera makes it."""
    noise = np.random.default_rng(0).integers(0, 255, (90, 120, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(noise).resize((1200, 900)).save(stream, "JPEG")
    return stream.getvalue()


class SlowCollate:
    """torch's collate, behind work of the CPU."""

    def __init__(self, takes_s: float) -> None:
        self.takes_s = takes_s

    def __call__(self, samples: list[Any]) -> Any:
        began_s = time.thread_time()
        while time.thread_time() - began_s < self.takes_s:
            pass
        return default_collate(samples)


class ManyTensors:
    """torch's collate, and beside it small tensors, as of a table with a tensor for each column, or one large one."""

    def __init__(self, num: int, *, stacked: bool) -> None:
        self.num, self.stacked = num, stacked

    def __call__(self, samples: list[Any]) -> Any:
        size = len(samples)
        columns = torch.zeros(size, self.num) if self.stacked else [torch.zeros(size) for _ in range(self.num)]
        return default_collate(samples) | {"columns": columns}


class WholeBatches(Samples):
    """The same, asked for whole batches at once."""

    def fetch(self, indices: Tensor, rng: SampleRng) -> dict[str, Tensor]:
        self.built += len(indices) - 1
        self._spend(self.sample_s * len(indices) * self._factor())
        inputs = self.inputs[indices]
        return {"inputs": inputs.double() if self.wide else inputs, "labels": self.labels[indices]}


def data(
    sizes: list[int],
    *,
    batch: int,
    step_ms: float,
    num_batches: int = 200,
    has_fetch: bool = False,
    eval_batches: int = 1,
    collate_steps: float = 0.0,
    columns: int = 0,
    stacked: bool = False,
    **faults: Any,
) -> Datasets:
    """Returns normal inputs ``[n, *sizes]`` whose first value decides their class.

    Args:
        collate_steps: what collate takes, in steps.
        columns: number of small tensors of a batch beside its inputs and labels.
        stacked: these are one tensor.
    """
    made = torch.Generator().manual_seed(0)

    def split(length: int, kind: type[Samples], **slow: Any) -> Samples:
        inputs = torch.randn(length, *sizes, generator=made)
        labels = (inputs.flatten(1)[:, 0] * 2).round().long().clamp(-2, 1) + 2
        return kind(inputs, labels, batch=batch, step_ms=step_ms, **slow)

    train = split(num_batches * batch, WholeBatches if has_fetch else Samples, **faults)
    collate: SlowCollate | ManyTensors | None = ManyTensors(columns, stacked=stacked) if columns else None
    if collate_steps:
        collate = SlowCollate(1e-3 * step_ms * collate_steps)
    return Datasets(train, split(max(1, eval_batches) * batch, WholeBatches) if eval_batches else None, collate=collate)


class Planted(nn.Module):
    """What the three models share: a rest that makes a step as long as it is on a device, and what goes wrong in it.

    Args:
        step_ms: a step is to take so long.
        rests: a forward pass rests until then.
        works: it multiplies matrices about that long instead.
        moves: it reads and writes large tensors instead, which a card's memory limits.
        joined: these operations are one, and the ``tiny`` tensors are one.
        size: rows and columns of its matrices on a real card, and of the layers of ``deep``; 0 = a simulated card.
        products: how many products a pass computes on a real card; 0 = as many as take ``step_ms``.
        first_s: what the first pass takes beside it, as where something is compiled.
        outlier_from: the pass from which on the loss is a thousand times as large, as of a damaged sample.
        pause_every, pause_s: the host stands still for so long after every so many passes.
        keeps_mib: of tensors that each pass keeps and never lets go.
        scratch_mib: of activations, for a batch of the whole step, from pass 20 on: no estimate can know.
        deep: so many layers beside the net, which compute and hold activations.
        asks: after each product it asks the device for a value.
        small_ops: operations on a handful of numbers in each pass.
        parallel: the net is wrapped in DataParallel.
        eval_steps: what a batch of an evaluation takes, in steps.
        extra_mib: that a checkpoint must hold beside the weights.
        last_step: the step in which ``over`` is said.
        grows: each pass takes so many steps longer than the one before.
        threads: torch computes with so many threads from the first pass on.
        tiny: so many tensors of 16 values are trained beside the net.
        burns: a thread of this process runs Python code from the first pass on.
        apart: a process of its own does that.
        jitters: standard deviation of the rest over its mean.
    """

    def __init__(
        self,
        net: nn.Module,
        *,
        step_ms: float,
        batch: int,
        rests: bool = True,
        works: bool = False,
        moves: bool = False,
        joined: bool = False,
        size: int = 0,
        products: int = 0,
        first_s: float = 0.0,
        outlier_from: int = 0,
        pause_every: int = 0,
        pause_s: float = 0.0,
        keeps_mib: float = 0.0,
        scratch_mib: float = 0.0,
        deep: int = 0,
        asks: bool = False,
        small_ops: int = 0,
        parallel: bool = False,
        eval_steps: float = 0.0,
        extra_mib: float = 0.0,
        last_step: int = 0,
        grows: float = 0.0,
        threads: int = 0,
        tiny: int = 0,
        burns: bool = False,
        apart: bool = False,
        jitters: float = 0.0,
    ) -> None:
        super().__init__()
        self.net = nn.DataParallel(net) if parallel else net
        self.step_s, self.batch, self.rests, self.works, self.moves = 1e-3 * step_ms, batch, rests, works, moves
        self.first_s, self.outlier_from, self.pause_every, self.pause_s = first_s, outlier_from, pause_every, pause_s
        self.keeps_mib, self.scratch_mib, self.asks, self.small_ops = keeps_mib, scratch_mib, asks, small_ops
        self.size, self.products = size, products
        self.layers = nn.Sequential(*(nn.Linear(size or CARD_SIZE, size or CARD_SIZE) for _ in range(deep)))
        self.eval_s = eval_steps * self.step_s
        self.kept: list[Tensor] = []
        self.passes, self.last_step = 0, last_step
        self.grows, self.threads, self.burns, self.jitters = grows, threads, burns, jitters
        self.joined, self.apart = joined, apart
        num, rows = (1, tiny) if joined and tiny else (tiny, 1)
        self.tiny = nn.ParameterList(torch.zeros(16 * rows) for _ in range(num))
        if extra_mib:
            self.register_buffer("extra", torch.randn(int(extra_mib * 2**18)))

    def loss(self, batch: Mapping[str, Tensor]) -> LossOutput:
        began_s = time.perf_counter()
        inputs = batch["inputs"].float()
        loss = nn.functional.cross_entropy(self.net(inputs), batch["labels"])
        if not self.training:
            time.sleep(self.eval_s)
            return LossOutput(loss)
        self.passes += 1
        self._tell()
        loss = self._go_wrong(loss, len(inputs) / self.batch)
        rest_s = self.step_s * len(inputs) / self.batch - (time.perf_counter() - began_s)
        if self.jitters:
            drawn = torch.Generator().manual_seed(self.passes)
            rest_s *= max(0.2, 1 + self.jitters * float(torch.randn((), generator=drawn)))
        if self.rests and rest_s > 0:
            time.sleep(rest_s)
        if self.grows:
            time.sleep(self.step_s * self.grows * self.passes)
        return LossOutput(loss)

    def _go_wrong(self, loss: Tensor, share: float) -> Tensor:
        """Makes the planted fault happen in a pass over this share of a step."""
        if self.threads and self.passes == 1:
            torch.set_num_threads(self.threads)
        if self.burns and self.passes == 1:
            _burn_beside(apart=self.apart)
        for weight in self.tiny:
            loss = loss + 0 * weight.sum()
        if self.first_s and self.passes == 1:
            time.sleep(self.first_s)
        if self.pause_every and self.passes % self.pause_every == 0:
            time.sleep(self.pause_s)
        value = loss.detach()
        for _ in range(self.small_ops):
            value = value * 1.0
        if self.keeps_mib:
            self.kept.append(torch.ones(int(self.keeps_mib * 2**18), device=loss.device))
        if self.works:
            self._work(loss.device, share)
        if self.moves:
            many = torch.ones(int(share * (self.size**2 or 2**20)), device=loss.device)
            for _ in range(1 if self.joined else self._times(many.clone, 2 * CARD_MS)):
                many = many * 1.0
        if len(self.layers):
            size = self.size or CARD_SIZE
            loss = loss + 0 * self.layers(torch.ones(round(size * share), size, device=loss.device)).mean()
        if self.scratch_mib and self.passes >= 20:
            wide = loss * torch.ones(int(share * self.scratch_mib * 2**16), device=loss.device)
            loss = loss + 0 * wide.relu().relu().relu().mean()
        return loss * 1000 if self.outlier_from and self.passes > self.outlier_from else loss

    def _work(self, device: torch.device, share: float) -> None:
        """On a card smaller products where the batch is a smaller part of the step; else fewer."""
        on_card = device.type == "cuda"
        size = (self.size or CARD_SIZE) if on_card else CORE_SIZE
        rows = torch.ones(max(1, round(size * share)) if on_card else size, size, device=device)
        square = torch.ones(size, size, device=device)
        if on_card:
            num = self._times(lambda: torch.mm(square, square), CARD_MS)
        else:
            num = int(1e3 * self.step_s * share / CORE_MS)
        for _ in range(num):
            product = torch.mm(rows, square)
            if self.asks:
                product[0, 0].item()

    def _times(self, operation: Callable[[], Tensor], simulated_ms: float) -> int:
        """How often the card can do it in a step: timed once on a real card."""
        if not self.size:
            return int(1e3 * self.step_s / simulated_ms)
        if not self.products:
            operation()
            torch.cuda.synchronize()
            began_s = time.perf_counter()
            for _ in range(TIMED_PRODUCTS):
                operation()
            torch.cuda.synchronize()
            self.products = max(1, round(self.step_s * TIMED_PRODUCTS / (time.perf_counter() - began_s)))
        return self.products

    def _tell(self) -> None:
        folder = os.environ.get(SIGNALS)
        if folder and self.passes == 2:
            (Path(folder) / "begun").touch()
        if folder and self.passes == self.last_step:
            (Path(folder) / "over").touch()


class Table(Planted):
    """Rows of numbers through three layers."""

    def __init__(self, features: int = 32, hidden: int = 64, **planted: Any) -> None:
        layers = [nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU()]
        super().__init__(nn.Sequential(*layers, nn.Linear(hidden, CLASSES)), **planted)


class Pictures(Planted):
    """Small pictures through two convolutions."""

    def __init__(self, channels: int = 8, **planted: Any) -> None:
        first = [nn.Conv2d(3, channels, 3, stride=2, padding=1), nn.ReLU()]
        second = [nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1), nn.ReLU()]
        head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * channels, CLASSES)]
        super().__init__(nn.Sequential(*first, *second, *head), **planted)


class Attention(nn.Module):
    """Self-attention over a sequence, the mean of its outputs, and a linear layer on it."""

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(features, hidden), nn.Linear(hidden, CLASSES)
        self.attention = nn.MultiheadAttention(hidden, 2, batch_first=True)

    def forward(self, values_BTF: Tensor) -> Tensor:
        inputs_BTH = self.embed(values_BTF)
        outputs_BTH, _ = self.attention(inputs_BTH, inputs_BTH, inputs_BTH, need_weights=False)
        found: Tensor = self.head(outputs_BTH.mean(1))
        return found


class Sequences(Planted):
    """Short sequences through attention."""

    def __init__(self, features: int = 8, hidden: int = 32, **planted: Any) -> None:
        super().__init__(Attention(features, hidden), **planted)


_BURN = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(1000))"
"""Python code, as of a cache that is kept up to date; it ends when its parent has ended."""


def _burn_beside(*, apart: bool) -> None:
    """Runs `_BURN` in a thread, or in a process."""
    if apart:
        subprocess.Popen([sys.executable, "-c", _BURN])
    else:
        threading.Thread(target=exec, args=(_BURN, {}), name="refresh-index", daemon=True).start()


class Pause(pl.Callback):
    """Takes some steps' time at the end of every so many steps, where Lightning's own callbacks log, or in the hook
    that ``when`` names."""

    def __init__(self, step_ms: float, steps: float, every: int = 1, when: str = "every") -> None:
        self.takes_s, self.every, self.when = 1e-3 * step_ms * steps, every, when
        if when.startswith("on_"):
            setattr(self, when, self._pause)

    def _pause(self, *_: Any, **__: Any) -> None:
        time.sleep(self.takes_s)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        every = trainer.log_every_n_steps if self.when == "logging" else self.every  # type: ignore[attr-defined]
        if self.when in ("every", "logging") and trainer.global_step % every == 0:
            time.sleep(self.takes_s)


class HostAverage(pl.Callback):
    """Averages the weights on the host every so many steps, value by value, as a hand-made EMA does."""

    def __init__(self, values: int, every: int = 1) -> None:
        self.mean, self.every = [0.0] * values, every

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        if trainer.global_step % self.every:
            return
        weights = [float(value) for weight in module.parameters() for value in weight.detach().flatten().tolist()]
        for place in range(len(self.mean)):
            self.mean[place] = 0.999 * self.mean[place] + 0.001 * weights[place % len(weights)]


class SlowSchedule(LRScheduler):
    """A schedule that takes long to compute its next value."""

    def __init__(self, optimizer: Any, takes_ms: float) -> None:
        self.takes_s = 1e-3 * takes_ms
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        time.sleep(self.takes_s)
        return [float(base) for base in self.base_lrs]
