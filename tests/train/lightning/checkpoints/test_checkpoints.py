import errno
import json
import math
import multiprocessing
import os
import signal
import sys
from collections.abc import Container
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from tests.kit import tiny
from wellfed.contract import LossOutput
from wellfed.process import Stopped, StopRequest
from wellfed.train.lightning import trainer as lit
from wellfed.train.lightning.callbacks.stop import StopAtStepEnd
from wellfed.train.lightning.checkpoints import checkpoint_files
from wellfed.train.lightning.checkpoints.checkpoints import BeforeUsers, Checkpoints, is_disk_error, is_finite
from wellfed.train.lightning.checkpoints.plain_checkpoint import PlainCheckpointIO
from wellfed.train.step.non_finite import NonFiniteLoss

pytestmark = pytest.mark.filterwarnings("ignore::Warning:lightning")


def step_of(path: Path) -> int:
    return int(torch.load(path, map_location="cpu", weights_only=True)["global_step"])


def test_the_latest_few_are_kept_and_told(tmp_path: Path) -> None:
    saved: list[tuple[int, str]] = []
    told = {"on_saved": lambda *facts: saved.append(facts)}
    callback = tiny.checkpoints(tmp_path, every_steps=2, keep_last=3, **told)
    tiny.fit(tiny.module(), tmp_path, [callback], max_steps=9)
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
    callback = tiny.checkpoints(tmp_path, every_steps=None, keep_last=1, **told)
    tiny.fit(tiny.module(), tmp_path, [callback], max_steps=None, max_epochs=3)
    assert saved == [3, 6, 9]
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["last.ckpt"]


def test_minutes_are_counted_from_the_last_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("wellfed.train.lightning.checkpoints.checkpoints.time.monotonic", lambda: now[0])
    saved: list[int] = []
    callback = tiny.checkpoints(tmp_path, minutes=1.0, on_saved=lambda step, name: saved.append(step))

    class Tick(pl.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            now[0] += 25

    tiny.fit(tiny.module(), tmp_path, [Tick(), callback], max_steps=8)
    assert saved == [3, 6, 8]  # after 75 s each, and the end


@pytest.mark.parametrize(("mode", "best"), [("max", 3), ("min", 4)])
def test_best_follows_the_metric_in_its_direction_and_is_the_later_of_equals(
    tmp_path: Path, mode: str, best: int
) -> None:
    metrics: dict[str, float] = {}
    values = iter([0.1, 0.9, 0.9, 0.1, float("nan")])
    callback = tiny.checkpoints(tmp_path, every_steps=None, metrics=metrics, best_mode=mode)

    class Values(pl.Callback):
        def on_validation_epoch_end(self, *_: Any) -> None:
            metrics["val/loss"] = next(values)

    callbacks = [BeforeUsers(callback), Values(), callback]
    trainer = lit.make_trainer(tiny.options(max_steps=None, max_epochs=5), callbacks, tmp_path)
    lit.fit(trainer, tiny.module(), tiny.loader(), tiny.eval_loader(), None)
    assert step_of(tmp_path / "best.ckpt") == 3 * best


def test_a_resumed_run_goes_on_comparing_with_the_best_so_far(tmp_path: Path) -> None:
    first = tiny.checkpoints(tmp_path)
    tiny.fit(tiny.module(), tmp_path, [first], max_steps=2)
    first.validated_at_end(0.1, 2)  # known only after the last checkpoint was written
    second = tiny.checkpoints(tmp_path)
    tiny.fit(tiny.module(), tmp_path, [second], checkpoint=tmp_path / "last.ckpt", max_steps=3)
    second.validated_at_end(0.2, 3)
    assert (second.best_value, step_of(tmp_path / "best.ckpt")) == (0.1, 2)
    second.validated_at_end(0.05, 3)
    assert (second.best_value, step_of(tmp_path / "best.ckpt")) == (0.05, 3)


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
    module, callback = tiny.module(model=Breaks(loss_too), on_nan=on_nan), tiny.checkpoints(tmp_path, every_steps=2)
    if on_nan == "skip":  # a finite loss with gradients that are not is left out, too
        tiny.fit(module, tmp_path, [callback], max_steps=6)
        assert step_of(tmp_path / "last.ckpt") == 6
        return
    with pytest.raises(NonFiniteLoss, match="within the steps 3 to 4; they are not saved.*gradient_clip") as caught:
        tiny.fit(module, tmp_path, [callback])
    assert caught.value.__notes__ == [
        "last.ckpt of step 2 is good: go on from it with trainer.gradient_clip=1.0 or trainer.on_nan=skip."
    ]
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["last.ckpt"]
    state = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]
    assert all(torch.isfinite(value).all() for value in state.values())
    if on_nan == "raise":
        resumed = tiny.fit(tiny.module(), tmp_path, checkpoint=tmp_path / "last.ckpt", max_steps=6)
        assert resumed.global_step == 6


def test_best_never_comes_from_what_is_not_finite(tmp_path: Path) -> None:
    """A metric may be finite with NaN weights, since ranks of NaN are."""
    metrics = {"val/loss": 0.5}
    callback = tiny.checkpoints(tmp_path, every_steps=None, metrics=metrics)
    torch.manual_seed(3)
    trainer = lit.make_trainer(tiny.options(max_steps=None, max_epochs=4), [BeforeUsers(callback), callback], tmp_path)
    with pytest.raises(NonFiniteLoss):
        lit.fit(trainer, tiny.module(model=Breaks(True)), tiny.loader(), tiny.eval_loader(), None)
    assert step_of(tmp_path / "best.ckpt") == step_of(tmp_path / "last.ckpt") == 3
    for value in (math.nan, math.inf, -math.inf):
        callback.validated_at_end(value, 3)
    assert callback.best_value == 0.5


def test_a_run_that_is_stopped_keeps_the_good_one_and_ends_as_it_was_to(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(3)
    callback, request = tiny.checkpoints(tmp_path, every_steps=3), StopRequest()

    class AskAtFive(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == 5:
                request.signum = signal.SIGINT

    last = StopAtStepEnd(request, callback.save_before_end)
    with request.listening(), pytest.raises(Stopped):
        tiny.fit(tiny.module(model=Breaks(True)), tmp_path, [callback, AskAtFive(), last])
    assert step_of(tmp_path / "last.ckpt") == 3
    assert "last.ckpt of step 3 is good" in caplog.text


def test_a_save_that_fails_keeps_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    callback = tiny.checkpoints(tmp_path, every_steps=2, on_disk_error=lambda error, step: told.append(step))
    _fail_at((4,), monkeypatch)
    tiny.fit(tiny.module(), tmp_path, [callback], max_steps=5)
    assert told == [4]
    assert step_of(tmp_path / "last.ckpt") == 5
    assert step_of(tmp_path / "last-1.ckpt") == 2
    assert not list(tmp_path.glob(".*"))


def _fail_at(steps: Container[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Fills the disk for the checkpoints of these steps."""
    save = pl.Trainer.save_checkpoint

    def full(self: pl.Trainer, path: Path, *rest: Any, **more: Any) -> None:
        if self.global_step in steps:
            Path(path).write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        save(self, path, *rest, **more)

    monkeypatch.setattr(pl.Trainer, "save_checkpoint", full)


@pytest.mark.parametrize("is_full", [True, False])
def test_a_damaged_last_replaces_no_sound_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_full: bool) -> None:
    """The run goes on from last-1.ckpt, since last.ckpt is damaged."""
    tiny.fit(tiny.module(), tmp_path, [tiny.checkpoints(tmp_path, every_steps=2)], max_steps=4)
    last, sound = tmp_path / "last.ckpt", tmp_path / "last-1.ckpt"
    last.write_bytes(b"damaged")
    _fail_at((5,) if is_full else (), monkeypatch)
    tiny.fit(tiny.module(), tmp_path, [tiny.checkpoints(tmp_path)], checkpoint=sound, max_steps=5)
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
    callback = tiny.checkpoints(
        folder / "checkpoints",
        every_steps=2,
        on_disk_error=lambda error, step: told.append(step),
        on_saved=lambda step, name: saved.append(step),
    )
    owner, name = (PlainCheckpointIO, "save_checkpoint") if fails == "write" else (Checkpoints, "_rotate")
    works, calls = getattr(owner, name), [0]

    def full_at_the_second(*given: Any, **named: Any) -> None:
        calls[0] += 1
        if calls[0] == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        works(*given, **named)

    setattr(owner, name, full_at_the_second)
    batches = tiny.loader(rank=rank, world_size=2)
    tiny.fit(tiny.module(), folder, [callback], batches=batches, devices=2, strategy="ddp", max_steps=4)
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
    assert json.loads((tmp_path / "0.json").read_text()) == [[4], [2, 4]]
    assert json.loads((tmp_path / "1.json").read_text()) == [[], []]
    assert step_of(tmp_path / "checkpoints" / "last.ckpt") == 4
    assert not list((tmp_path / "checkpoints").glob(".*"))


def test_torchs_writer_hides_the_errno(tmp_path: Path) -> None:
    writer_error = RuntimeError(
        "[enforce fail at inline_container.cc:862] . PytorchStreamWriter failed writing file data/0"
    )
    assert is_disk_error(writer_error)
    outer = RuntimeError("saving failed")
    outer.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    assert is_disk_error(outer)
    assert not is_disk_error(RuntimeError("shapes differ"))


class Odd(pl.LightningModule):
    """A module with weights of many kinds, and with other tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.full, self.small = nn.Parameter(torch.ones(3)), nn.Parameter(torch.full((2,), 3e4, dtype=torch.float16))
        self.brain = nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16))
        self.empty, self.lazy = nn.Parameter(torch.ones(0)), nn.LazyLinear(2)
        self.frozen = nn.Parameter(torch.full((2,), -math.inf), requires_grad=False)
        self.register_buffer("mask", torch.full((2,), -math.inf))


def test_masks_and_frozen_weights_may_be_infinite() -> None:
    assert is_finite(Odd())
    assert is_finite(pl.LightningModule())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["full", "small", "brain"])
def test_a_single_weight_is_seen(name: str, value: float) -> None:
    module = Odd()
    getattr(module, name).data.view(-1)[-1] = value
    assert not is_finite(module)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_so_is_a_loss_since_the_last_row(value: float) -> None:
    module = tiny.module()
    module.plain.totals.add("loss", torch.tensor(value), 1)
    assert is_finite(module)  # not yet known to count
    module.plain.totals.commit()
    assert not is_finite(module)
    module.plain.totals.take()
    assert is_finite(module)


@pytest.mark.simulated(cards=1)
def test_a_card_is_waited_for_once() -> None:
    import fake_cuda

    module = tiny.module().cuda()
    before = fake_cuda.driver.counts()
    assert is_finite(module)
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


def test_a_write_that_fails_keeps_the_file_before_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    path.write_text("before")

    def fail() -> None:
        with checkpoint_files.replacing(path) as temporary:
            temporary.write_text("half")
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        fail()
    assert [file.name for file in tmp_path.iterdir()] == ["a.ckpt"]
    assert path.read_text() == "before"
