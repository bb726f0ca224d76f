import errno
import json
import math
import multiprocessing
import os
import random
import signal
import sys
from collections.abc import Container
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from tests.kit import loop, tiny
from tests.kit.gloo_ranks import join, leave, of_ranks
from wellfed.contract import LossOutput
from wellfed.data.own_loader import OwnLoader
from wellfed.process import Stopped, StopRequest
from wellfed.train.loop import checkpoint_files
from wellfed.train.loop import training as loops
from wellfed.train.loop.checkpoints import Checkpoints, is_disk_error, is_finite
from wellfed.train.loop.training import Training
from wellfed.train.step.non_finite import NonFiniteLoss

CPU = torch.device("cpu")


def step_of(path: Path) -> int:
    return int(torch.load(path, map_location="cpu", weights_only=True)["global_step"])


def test_the_latest_few_are_kept_and_told(tmp_path: Path) -> None:
    saved: list[tuple[int, str]] = []
    told = {"on_saved": lambda *facts: saved.append(facts)}
    callback = loop.checkpoints(tmp_path, every_steps=2, keep_last=3, **told)
    loop.fit(loop.model(), checkpoints=callback, max_steps=9)
    assert saved == [(step, "last.ckpt") for step in (2, 4, 6, 8, 9)]
    assert {path.name: step_of(path) for path in tmp_path.glob("*.ckpt")} == {
        "last.ckpt": 9,
        "last-1.ckpt": 8,
        "last-2.ckpt": 6,
    }
    assert not list(tmp_path.glob(".*"))


def test_without_a_step_count_each_epoch_is_saved(tmp_path: Path) -> None:
    saved: list[int] = []
    told = {"on_saved": lambda step, name: saved.append(step)}
    callback = loop.checkpoints(tmp_path, every_steps=None, keep_last=1, **told)
    loop.fit(loop.model(), checkpoints=callback, max_steps=None, max_epochs=3)
    assert saved == [3, 6, 9]
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["last.ckpt"]


def test_minutes_are_counted_from_the_last_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, saved = [0.0], list[int]()
    monkeypatch.setattr(loops.time, "monotonic", lambda: now[0])
    callback = loop.checkpoints(tmp_path, minutes=1.0, on_saved=lambda step, name: saved.append(step))

    class Ticks(tiny.TinyModel):
        def loss(self, batch: Any) -> LossOutput:
            now[0] += 25
            return super().loss(batch)

    loop.fit(loop.model(model=Ticks()), checkpoints=callback, max_steps=8)
    assert saved == [3, 6, 8]  # after 75 s each, and the end


class Values:
    """An evaluation with given values, one a validation."""

    best_metric, best_mode = "mine", "max"

    def __init__(self, *values: float) -> None:
        self._values = iter(values)

    def reset(self) -> None: ...

    def update(self, model: Any, batch: Any, *features: Any) -> None: ...

    def compute(self) -> dict[str, float]:
        return {"mine": next(self._values)}


def compared(
    tmp_path: Path, *values: float, checkpoint: Path | None = None, epochs: int | None = None, **more: Any
) -> Any:
    """Trains an epoch for each value, which its validation gives; returns the checkpoints."""
    callback = loop.checkpoints(tmp_path, every_steps=None, best_metric="mine", **more)
    limits = {"max_steps": None, "max_epochs": epochs or len(values), "validation": tiny.eval_loader()}
    loop.fit(loop.model(evaluation=Values(*values)), checkpoints=callback, checkpoint=checkpoint, **limits)
    return callback


@pytest.mark.parametrize(("mode", "best"), [("max", 3), ("min", 4)])
def test_best_follows_the_metric_in_its_direction_and_is_the_later_of_equals(
    tmp_path: Path, mode: str, best: int
) -> None:
    compared(tmp_path, 0.1, 0.9, 0.9, 0.1, float("nan"), best_mode=mode)
    assert step_of(tmp_path / "best.ckpt") == 3 * best


def test_a_resumed_run_goes_on_comparing_with_the_best_so_far(tmp_path: Path) -> None:
    compared(tmp_path, 0.2)
    second = compared(tmp_path, 0.3, 0.1, checkpoint=tmp_path / "last.ckpt", epochs=3)
    assert (second.best_value, step_of(tmp_path / "best.ckpt")) == (0.1, 9)


class Breaks(tiny.TinyModel):
    """A model with NaN gradients in step 4, and with ``loss_too`` a NaN loss."""

    def __init__(self, loss_too: bool) -> None:
        super().__init__()
        self.loss_too, self.steps = loss_too, 0

    def loss(self, batch: Any) -> LossOutput:
        output = super().loss(batch)
        self.steps += self.training
        if not self.training or self.steps != 4:
            return output
        if self.loss_too:
            return LossOutput(output.loss * math.nan)
        weight = self.net[0].weight
        return LossOutput(output.loss + (weight - weight.detach()).abs().sqrt().sum())  # its slope at 0 is infinite


@pytest.mark.parametrize("loss_too", [True, False])
@pytest.mark.parametrize("on_nan", ["raise", "skip"])
def test_no_checkpoint_is_written_of_what_is_not_finite(tmp_path: Path, loss_too: bool, on_nan: str) -> None:
    torch.manual_seed(3)
    module, callback = loop.model(model=Breaks(loss_too), on_nan=on_nan), loop.checkpoints(tmp_path, every_steps=2)
    if on_nan == "skip":  # a finite loss with gradients that are not is left out, too
        loop.fit(module, checkpoints=callback, max_steps=6)
        assert step_of(tmp_path / "last.ckpt") == 6
        return
    with pytest.raises(NonFiniteLoss, match="within the steps 3 to 4; they are not saved.*gradient_clip") as caught:
        loop.fit(module, checkpoints=callback)
    assert caught.value.__notes__ == ["last.ckpt of step 2 is good: go on from it, as with trainer.gradient_clip=1.0."]
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["last.ckpt"]
    state = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]
    assert all(torch.isfinite(value).all() for value in state.values())
    if on_nan == "raise":
        assert loop.fit(loop.model(), checkpoint=tmp_path / "last.ckpt", max_steps=6).number == 6


def test_best_never_comes_from_what_is_not_finite(tmp_path: Path) -> None:
    """A metric may be finite with NaN weights, since ranks of NaN are."""
    callback = loop.checkpoints(tmp_path, every_steps=None, best_metric="mine")
    placed = loop.model(model=Breaks(True), evaluation=Values(0.5, 0.5))
    with pytest.raises(NonFiniteLoss):
        loop.fit(placed, checkpoints=callback, validation=tiny.eval_loader(), max_steps=None, max_epochs=4)
    assert step_of(tmp_path / "best.ckpt") == step_of(tmp_path / "last.ckpt") == 3
    assert callback.best_value == 0.5
    assert not any(map(callback.is_best, (math.nan, math.inf, -math.inf, None)))


def test_a_run_that_is_stopped_keeps_the_good_one_and_ends_as_it_was_to(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    callback, request = loop.checkpoints(tmp_path, every_steps=3), StopRequest()

    def ask(step: int) -> None:
        if step == 5:
            request.signum = signal.SIGINT

    asks = {"callbacks": {"asks": loop.After(ask)}, "stop": request}
    with pytest.raises(Stopped):
        loop.fit(loop.model(model=Breaks(True)), checkpoints=callback, **asks)
    assert step_of(tmp_path / "last.ckpt") == 3
    assert "The state after step 5 could not be saved" in caplog.text


def test_a_save_that_fails_keeps_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    callback = loop.checkpoints(tmp_path, every_steps=2, on_disk_error=lambda error, step: told.append(step))
    _fail_at((4,), monkeypatch)
    loop.fit(loop.model(), checkpoints=callback, max_steps=5)
    assert told == [4]
    assert step_of(tmp_path / "last.ckpt") == 5
    assert step_of(tmp_path / "last-1.ckpt") == 2
    assert not list(tmp_path.glob(".*"))


def _fail_at(steps: Container[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Fills the disk for the checkpoints of these steps."""
    write = Training.write

    def full(self: Training, path: Path, more: Any) -> None:
        if self.number in steps:
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, path, more)

    monkeypatch.setattr(Training, "write", full)


@pytest.mark.parametrize("is_full", [True, False])
def test_a_damaged_last_replaces_no_sound_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_full: bool) -> None:
    """The run goes on from last-1.ckpt, since last.ckpt is damaged."""
    loop.fit(loop.model(), checkpoints=loop.checkpoints(tmp_path, every_steps=2), max_steps=4)
    last, sound = tmp_path / "last.ckpt", tmp_path / "last-1.ckpt"
    last.write_bytes(b"damaged")
    _fail_at((5,) if is_full else (), monkeypatch)
    loop.fit(loop.model(), checkpoints=loop.checkpoints(tmp_path), checkpoint=sound, max_steps=5)
    assert step_of(sound) == 2
    assert is_full or step_of(last) == 5


def _train_on_a_full_disk(rank: int, fails: str, folder: Path) -> None:
    """Runs one of two ranks; rank 0 can't write its second checkpoint. Writes events and saved files."""
    torch.set_num_threads(1)
    os.environ |= {"WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank), "NODE_RANK": "0"}
    store = torch.distributed.FileStore(str(folder / "store"), 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=30))
    told: list[int] = []
    saved: list[int] = []
    callback = loop.checkpoints(
        folder / "checkpoints",
        every_steps=2,
        on_disk_error=lambda error, step: told.append(step),
        on_saved=lambda step, name: saved.append(step),
    )
    owner, name = (loops, "save") if fails == "write" else (Checkpoints, "_rotate")
    works, calls = getattr(owner, name), [0]

    def full_at_the_second(*given: Any, **named: Any) -> None:
        calls[0] += 1
        if calls[0] == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        works(*given, **named)

    setattr(owner, name, full_at_the_second)
    batches = tiny.loader(rank=rank, world_size=2)
    loop.fit(loop.model(), batches, checkpoints=callback, devices=2, strategy="ddp", max_steps=5)
    (folder / f"{rank}.json").write_text(json.dumps([told, saved]))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="forks")
@pytest.mark.parametrize("fails", ["write", "rename"])
def test_other_ranks_do_not_wait_for_one_whose_disk_is_full(tmp_path: Path, fails: str) -> None:
    """All ranks try again at the same step, here at the end of training."""
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_train_on_a_full_disk, args=(rank, fails, tmp_path)) for rank in (0, 1)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(40)
        process.kill()
    assert json.loads((tmp_path / "0.json").read_text()) == [[4], [2, 5]]
    assert json.loads((tmp_path / "1.json").read_text()) == [[], []]
    assert step_of(tmp_path / "checkpoints" / "last.ckpt") == 5
    assert not list((tmp_path / "checkpoints").glob(".*"))


class Share(IterableDataset[Any]):
    """A rank's share of the samples, in an order that it draws from Python's generator."""

    def __iter__(self) -> Any:
        rows, own = tiny.TinyData(24), list(range(torch.distributed.get_rank(), 24, 2))
        random.shuffle(own)
        return (rows[index] for index in own)


class Reader(tiny.TinyModel):
    """Keeps the batches."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[Any] = []

    def loss(self, batch: Any) -> Any:
        self.read.append(batch["x"].tolist())
        return super().loss(batch)


def _resume_within_an_epoch(rank: int, folder: Path) -> None:
    """Runs one of two ranks; leaves what it reads after step 3 without and with a resume."""
    join(rank, folder)
    os.environ |= {"WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank), "NODE_RANK": "0"}
    seen = []
    for limit, start in ((8, None), (3, None), (8, folder / "3" / "last.ckpt")):
        model = Reader()
        placed = loop.model(model=model)
        random.seed(7 + rank)
        batches = OwnLoader(DataLoader(Share(), 2), world_size=2)
        saves = loop.checkpoints(folder / str(limit))
        more = {"devices": 2, "strategy": "ddp", "max_steps": limit}
        loop.fit(placed, batches, checkpoints=saves, checkpoint=start, **more)
        seen.append(model.read)
    leave(rank, folder, seen)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_each_rank_goes_on_with_its_own_order(tmp_path: Path) -> None:
    for whole, begun, resumed in of_ranks(_resume_within_an_epoch, tmp_path):
        assert begun + resumed == whole


def test_torchs_writer_hides_the_errno(tmp_path: Path) -> None:
    writer_error = RuntimeError(
        "[enforce fail at inline_container.cc:862] . PytorchStreamWriter failed writing file data/0"
    )
    assert is_disk_error(writer_error)
    assert not is_disk_error(RuntimeError("shapes differ"))


class Odd(nn.Module):
    """A module with weights of many kinds, and with other tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.full, self.small = nn.Parameter(torch.ones(3)), nn.Parameter(torch.full((2,), 3e4, dtype=torch.float16))
        self.brain = nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16))
        self.empty, self.lazy = nn.Parameter(torch.ones(0)), nn.LazyLinear(2)
        self.frozen = nn.Parameter(torch.full((2,), -math.inf), requires_grad=False)
        self.register_buffer("mask", torch.full((2,), -math.inf))


def test_masks_and_frozen_weights_may_be_infinite() -> None:
    assert is_finite(Odd(), CPU)
    assert is_finite(nn.Module(), CPU)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["full", "small", "brain"])
def test_a_single_weight_is_seen(name: str, value: float) -> None:
    module = Odd()
    getattr(module, name).data.view(-1)[-1] = value
    assert not is_finite(module, CPU)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_so_is_a_loss_since_the_last_row(value: float) -> None:
    assert is_finite(nn.Linear(1, 1), CPU, [torch.tensor(0.5)])
    assert not is_finite(nn.Linear(1, 1), CPU, [torch.tensor(value)])


@pytest.mark.simulated(cards=1)
def test_a_card_is_waited_for_once() -> None:
    import fake_cuda

    module, loss = tiny.TinyModel().cuda(), torch.tensor(0.5, device="cuda")
    before = fake_cuda.driver.counts()
    assert is_finite(module, torch.device("cuda", 0), [loss])
    after = fake_cuda.driver.counts()
    assert after["synchronisations"] - before["synchronisations"] == 1


def flip(path: Path, place: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(len(data) * place)] ^= 0xFF
    path.write_bytes(data)


def test_a_file_that_was_cut_or_changed_is_not_intact(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    content = {"w": torch.arange(5000.0)}
    for damage in (None, lambda: flip(path, 0.5), lambda: path.write_bytes(path.read_bytes()[:-100]), path.unlink):
        torch.save(content, path)
        assert checkpoint_files.is_intact(path)
        if damage is not None:
            damage()
            assert not checkpoint_files.is_intact(path)
