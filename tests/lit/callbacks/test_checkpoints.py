from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from tests.lit import tiny
from wellfed.lit.callbacks.checkpoints import is_disk_error

pytestmark = pytest.mark.filterwarnings("ignore::Warning:lightning")


def step_of(path: Path) -> int:
    return int(torch.load(path, weights_only=True)["global_step"])


def test_the_latest_few_are_kept_and_told(tmp_path: Path) -> None:
    saved: list[tuple[int, str]] = []
    callback = tiny.checkpoints(tmp_path, every_steps=2, keep_last=3)
    callback.on_saved = lambda *facts: saved.append(facts)
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
    callback = tiny.checkpoints(tmp_path, every_steps=None, keep_last=1)
    callback.on_saved = lambda step, name: saved.append(step)
    tiny.fit(tiny.module(), tmp_path, [callback], max_steps=None, max_epochs=3)
    assert saved == [3, 6, 9]
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["last.ckpt"]


def test_minutes_are_counted_from_the_last_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("wellfed.lit.callbacks.checkpoints.time.monotonic", lambda: now[0])
    saved: list[int] = []
    callback = tiny.checkpoints(tmp_path, minutes=1.0)
    callback.on_saved = lambda step, name: saved.append(step)

    class Tick(pl.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            now[0] += 25

    tiny.fit(tiny.module(), tmp_path, [Tick(), callback], max_steps=8)
    assert saved == [3, 6, 8]  # after 75 s each, and the end


@pytest.mark.parametrize(("mode", "best"), [("max", 2), ("min", 3)])
def test_best_follows_the_metric_in_its_direction(tmp_path: Path, mode: str, best: int) -> None:
    metrics: dict[str, float] = {}
    values = iter([0.2, 0.9, 0.1, float("nan")])
    callback = tiny.checkpoints(tmp_path, every_steps=None, metrics=metrics, best_mode=mode)

    class Values(pl.Callback):
        def on_validation_epoch_end(self, *_: Any) -> None:
            metrics["val/loss"] = next(values)

    from wellfed.lit import trainer as lit

    trainer = lit.make_trainer(tiny.options(max_steps=None, max_epochs=4), [Values(), callback], tmp_path)
    lit.fit(trainer, tiny.module(), tiny.loader(), tiny.eval_loader(), None)
    assert step_of(tmp_path / "best.ckpt") == 3 * best


def test_a_resumed_run_goes_on_comparing_with_the_best_so_far(tmp_path: Path) -> None:
    first = tiny.checkpoints(tmp_path)
    tiny.fit(tiny.module(), tmp_path, [first], max_steps=2)
    first.validated_at_end(0.1)  # known only after the last checkpoint was written
    second = tiny.checkpoints(tmp_path)
    tiny.fit(tiny.module(), tmp_path, [second], checkpoint=tmp_path / "last.ckpt", max_steps=3)
    second.validated_at_end(0.2)
    assert (second.best_value, step_of(tmp_path / "best.ckpt")) == (0.1, 2)
    second.validated_at_end(0.05)
    assert (second.best_value, step_of(tmp_path / "best.ckpt")) == (0.05, 3)


def test_another_folder_knows_no_best_yet(tmp_path: Path) -> None:
    first = tiny.checkpoints(tmp_path / "one")
    tiny.fit(tiny.module(), tmp_path, [first], max_steps=2)
    first.validated_at_end(0.1)
    second = tiny.checkpoints(tmp_path / "two")
    tiny.fit(tiny.module(), tmp_path, [second], checkpoint=tmp_path / "one" / "last.ckpt", max_steps=3)
    second.validated_at_end(0.2)
    assert step_of(tmp_path / "two" / "best.ckpt") == 3


def test_a_save_that_fails_keeps_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    callback = tiny.checkpoints(tmp_path, every_steps=2, on_disk_error=lambda error, step: told.append(step))
    save = pl.Trainer.save_checkpoint

    def full_at_four(self: pl.Trainer, path: Path, *rest: Any, **more: Any) -> None:
        if self.global_step == 4:
            Path(path).write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        save(self, path, *rest, **more)

    monkeypatch.setattr(pl.Trainer, "save_checkpoint", full_at_four)
    tiny.fit(tiny.module(), tmp_path, [callback], max_steps=5)
    assert told == [4]
    assert step_of(tmp_path / "last.ckpt") == 5
    assert step_of(tmp_path / "last-1.ckpt") == 2
    assert not list(tmp_path.glob(".*"))


def test_an_error_that_is_not_the_disks_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("can't pickle this")

    monkeypatch.setattr(pl.Trainer, "save_checkpoint", broken)
    with pytest.raises(RuntimeError, match="can't pickle"):
        tiny.fit(tiny.module(), tmp_path, [tiny.checkpoints(tmp_path)], max_steps=2)


def test_torchs_writer_hides_the_errno(tmp_path: Path) -> None:
    writer_error = RuntimeError(
        "[enforce fail at inline_container.cc:862] . PytorchStreamWriter failed writing file data/0"
    )
    assert is_disk_error(writer_error)
    outer = RuntimeError("saving failed")
    outer.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    assert is_disk_error(outer)
    assert not is_disk_error(RuntimeError("shapes differ"))
