"""Device prefetch on simulated cards: which card, how much of it, and every synchronisation that it needs."""

import itertools
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from wellfed.data import device_prefetch
from wellfed.data.settings import LoaderSettings
from wellfed.data.train_loader import train_loader

STEPS, ROWS, COLUMNS = 16, 16, 8
MIB = 2**20
BATCH_MIB, SMALL_MIB, CARD = 12, 2, 1
KERNEL_US, COPY_GBPS = 4000, 2.0
"""A step takes 36 ms of the card's time and the copy of a batch 6."""


def some_columns(rows: torch.Tensor) -> torch.Tensor:
    """What is written and read of a batch: simulated cards are slow because they are told to be."""
    return rows[:, :: rows.shape[1] // COLUMNS]


class Reusing:
    """Hands out views of one pinned buffer, and poisons what it handed out before."""

    def __init__(self, mib: float = 1.0) -> None:
        self.buffer = torch.zeros(ROWS, int(mib * MIB) // (4 * ROWS)).pin_memory()
        self.devices: set[int] = set()

    def __len__(self) -> int:
        return STEPS * ROWS

    def __getitem__(self, index: int) -> Any:
        raise NotImplementedError

    def fetch(self, indices: torch.Tensor, rng: Any) -> Any:
        self.devices.add(torch.cuda.current_device())
        some_columns(self.buffer).fill_(float("nan"))
        some_columns(self.buffer).copy_(indices.float().unsqueeze(1).expand(ROWS, COLUMNS))
        return self.buffer, indices.clone().pin_memory()


def prefetcher(data: Any, ahead: int, *, source: ModuleType = device_prefetch, card: int = 0, **more: Any) -> Any:
    loader = train_loader(data, batch_size=ROWS, seed=1, settings=LoaderSettings())
    return source.DevicePrefetcher(loader, torch.device("cuda", card), ahead, **more)


def step(batch: Any, wrong: torch.Tensor, kernels: int = 3) -> None:
    """Counts values that are not those of the batch; launches only, and waits for nothing."""
    rows, indices = batch
    for _ in range(kernels):
        wrong += (some_columns(rows) != indices.unsqueeze(1)).sum()


@pytest.mark.simulated(cards=4, slowdown=5)
def test_batches_come_to_the_ranks_own_card() -> None:
    import fake_cuda

    for card in (3, 1):
        data = Reusing()
        torch.cuda.set_device(card)  # as Lightning does in the main thread
        wrong = torch.zeros((), device=f"cuda:{card}")
        ahead = prefetcher(data, 2, card=card, move=lambda batch, _: tuple(each.to("cuda") for each in batch))
        for delivery in ahead:
            assert {tensor.device for tensor in delivery.batch} == {torch.device("cuda", card)}
            step(delivery.batch, wrong)
        ahead.close()
        assert wrong.item() == 0
        assert data.devices == {card}
        assert fake_cuda.driver.violations() == []
    assert [card for card in range(4) if fake_cuda.driver.has_context(card)] == [1, 3]


class Slow(Reusing):
    """Data that takes far longer to read than its copy to a card."""

    def fetch(self, indices: torch.Tensor, rng: Any) -> Any:
        time.sleep(0.1)
        return super().fetch(indices, rng)


@pytest.mark.simulated(cards=1, copy_gbps=COPY_GBPS)
def test_a_batch_tells_what_its_copy_took_without_the_wait_for_the_loader() -> None:
    ahead = prefetcher(Slow(BATCH_MIB), 2)
    took_ms = [delivery.copy_ahead_ms for delivery in itertools.islice(ahead, 6)]
    ahead.close()
    assert 5 < np.median(took_ms) < 60  # 6 by the rate of the card


@dataclass
class Seen:
    """What a run on one card showed."""

    wrong: int
    """Values that were not those of their batch."""
    violations: list[str]
    held_mib: float
    """The most that batches have taken of the card."""
    idle_frac: float
    """Share of the card's time between two steps, from the second step on."""
    late_frac: float
    """Share of batches that were waited for when they were asked for, once copies have got ahead."""
    spins: bool
    """An event was waited for by a loop that keeps a core busy."""
    devices: set[int]
    """Current ones where batches are built."""

    def faults(self, ahead: int) -> list[str]:
        """In words; none where all is as it should be."""
        found = ["wrong values"] * (self.wrong > 0) + self.violations[:1]
        found += [f"{self.held_mib:g} MiB held"] * (self.held_mib > BATCH_MIB * (ahead + 1) + SMALL_MIB)
        found += [f"idle for {self.idle_frac:.0%}"] * (self.idle_frac > 0.3)
        found += [f"{self.late_frac:.0%} late"] * (ahead > 1 and self.late_frac > 0.5)
        return found + ["spins"] * self.spins + ["another device"] * (self.devices != {CARD})


def mark() -> torch.cuda.Event:
    """A time of the card, passed or to come."""
    event = torch.cuda.Event(enable_timing=True, blocking=True)
    event.record()
    return event


def run(source: ModuleType, ahead: int, *, late_s: float = 0.0, **more: Any) -> Seen:
    """Train for an epoch without ever waiting for the card; the host is late with its first step."""
    import fake_cuda

    data, wrong = Reusing(BATCH_MIB), torch.zeros((), device=f"cuda:{CARD}")

    class Event(torch.cuda.Event):
        def __new__(cls, enable_timing: bool = False, blocking: bool = False, **more: Any) -> Any:
            spins.add(not blocking)
            return super().__new__(cls, enable_timing=enable_timing, blocking=blocking, **more)

    spins: set[bool] = set()
    torch.cuda.set_device(CARD)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    marks, waits_s = [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "Event", Event)
        made = prefetcher(data, ahead, source=source, card=CARD, **more)
        deliveries = iter(made)
        while True:
            made.keep_pace()
            asked_s = time.perf_counter()
            delivery = next(deliveries, None)
            waits_s.append(time.perf_counter() - asked_s)
            if delivery is None:
                break
            time.sleep(late_s if not marks else 0)
            begin = mark()
            step(delivery.batch, wrong)
            del delivery
            marks.append((begin, mark()))
        made.close()
    torch.cuda.synchronize()
    gaps = [end.elapsed_time(begin) for (_, end), (begin, _) in itertools.pairwise(marks)][1:]
    whole = marks[1][0].elapsed_time(marks[-1][1])
    return Seen(
        wrong=int(wrong),
        violations=fake_cuda.driver.violations(),
        held_mib=(torch.cuda.max_memory_reserved() - before) / MIB,
        idle_frac=sum(gaps) / whole,
        late_frac=sum(wait_s > 0.2 * whole / 1000 / STEPS for wait_s in waits_s[STEPS // 2 : STEPS]) / (STEPS / 2),
        spins=True in spins,
        devices=data.devices,
    )


slow = pytest.mark.simulated(cards=2, kernel_us=KERNEL_US, copy_gbps=COPY_GBPS)


@pytest.mark.slow
@slow
def test_a_card_that_lags_behind_holds_what_it_may_and_is_never_idle() -> None:
    for ahead in (1, 2, 4):
        seen = run(device_prefetch, ahead)
        assert seen.faults(ahead) == []
        assert seen.held_mib >= BATCH_MIB * ahead


DELETIONS = (
    (r"\.synchronize\(\)", ""),
    (r"\w+\.record(_stream)?\(.*\)", "pass"),
    (r"\w+\.wait_(event|stream)\(.*\)", "pass"),
    (r"with torch\.cuda\.stream\(.*\):", "if True:"),
    (r"torch\.cuda\.set_device\(.*\)", "pass"),
    (r"blocking=True", ""),
)


def mutations(source: str) -> Iterator[tuple[str, str]]:
    """Each synchronisation of the source deleted, one at a time, with the line that it stood in."""
    for pattern, instead in DELETIONS:
        for found in re.finditer(pattern, source):
            line = source[source.rfind("\n", 0, found.start()) + 1 : source.find("\n", found.end())]
            yield line.strip(), source[: found.start()] + instead + source[found.end() :]


@pytest.mark.slow
@slow
def test_deleting_any_synchronisation_is_seen() -> None:
    source, seen = Path(device_prefetch.__file__).read_text(), {}
    for line, text in mutations(source):
        mutated = ModuleType("mutated")
        exec(compile(text, device_prefetch.__file__, "exec"), vars(mutated))
        seen[line] = run(mutated, 2).faults(2)
    assert len(seen) == 8, seen
    assert all(seen.values()), seen
