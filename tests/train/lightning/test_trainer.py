from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
from lightning.pytorch.callbacks import EarlyStopping

from tests.kit import tiny
from wellfed.train.checkpoint_values import load
from wellfed.train.lightning import trainer as lit
from wellfed.train.lightning.hooks import Together
from wellfed.train.lightning.trainer import ended_by, make_trainer, total_steps

pytestmark = pytest.mark.filterwarnings("ignore::Warning:lightning")


@pytest.mark.parametrize(
    ("epochs", "steps", "expected"), [(3, None, 30), (3, 25, 25), (3, 99, 30), (None, 7, 7), (None, None, None)]
)
def test_the_first_limit_counts(epochs: int | None, steps: int | None, expected: int | None) -> None:
    assert total_steps(tiny.options(max_epochs=epochs, max_steps=steps), 10) == expected


def test_weights_come_back_from_a_checkpoint(tmp_path: Path) -> None:
    trained = tiny.module()
    tiny.fit(trained, tmp_path, [tiny.checkpoints(tmp_path)], max_steps=3)
    fresh = tiny.module()
    assert not (tiny.weights(fresh) == tiny.weights(trained)).all()
    lit.load_weights(fresh, tmp_path / "last.ckpt")
    assert (tiny.weights(fresh) == tiny.weights(trained)).all()


class WithObjects(tiny.TinyModel):
    """A model whose own state has a plain part and an object."""

    def __init__(self) -> None:
        super().__init__()
        self.extra: dict[str, Any] = {"count": 0, "path": Path("a")}

    def get_extra_state(self) -> dict[str, Any]:
        return self.extra

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.extra = state


def test_a_checkpoint_of_a_model_with_objects_can_be_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Hyperparameters of a LightningDataModule, numpy's numbers in an optimizer, and the model's extra state."""
    data = pl.LightningDataModule()
    data.save_hyperparameters({"transform": WithObjects, "size": 3})

    def fit(model: WithObjects, steps: int, checkpoint: Path | None) -> Any:
        saves = tiny.checkpoints(tmp_path)
        trainer = make_trainer(tiny.options(max_steps=steps), [saves], tmp_path)
        module = tiny.module(model=model, lr=np.float64(0.01))
        if checkpoint is not None:
            assert not lit.misfits(module, load(checkpoint)["state_dict"])
        lit.fit(trainer, module, tiny.loader(), None, checkpoint)
        trainer.datamodule = data
        trainer.save_checkpoint(tmp_path / "own.ckpt")

    model, other = WithObjects(), WithObjects()
    model.extra["count"] = 4
    fit(model, 2, None)
    loaded = load(tmp_path / "own.ckpt")
    assert loaded[data.CHECKPOINT_HYPER_PARAMS_KEY] == {"size": 3}
    assert "transform (type)" in caplog.text
    fit(other, 4, tmp_path / "last.ckpt")
    assert other.extra == {"count": 4, "path": Path("a")}


pytestmark = pytest.mark.filterwarnings("ignore::Warning:lightning")
HOOKS = ["setup", "on_fit_start", "on_train_start", "on_train_batch_start", "on_before_optimizer_step"]
HOOKS += ["on_train_batch_end", "on_train_epoch_end", "on_save_checkpoint", "on_train_end", "teardown"]


class Hears(pl.Callback):
    def __init__(self, name: str, heard: list[tuple[str, str]]) -> None:
        self.name, self.heard = name, heard

    def on_exception(self, trainer, module, exception):
        self.heard.append((self.name, str(exception)))


for hook in HOOKS:
    setattr(Hears, hook, lambda self, *_, hook=hook, **__: self.heard.append((self.name, hook)))


def test_each_hook_reaches_each_callback_in_order(tmp_path: Path) -> None:
    alone: list[tuple[str, str]] = []
    together: list[tuple[str, str]] = []
    for heard, make in ((alone, list), (together, lambda callbacks: [Together(callbacks)])):
        callbacks = [Hears(name, heard) for name in ("first", "second")]
        trainer = pl.Trainer(
            accelerator="cpu",
            max_steps=2,
            callbacks=make([callbacks[0], pl.Callback(), callbacks[1]]),
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        )
        trainer.fit(tiny.Lightnings(tiny.module()), tiny.loader())
        trainer.save_checkpoint(tmp_path / "any.ckpt")
    assert together == alone
    assert {hook for _, hook in together} == set(HOOKS)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"max_steps": 2}, "trainer.max_steps=2"),
        ({"max_steps": None, "max_epochs": 1}, "trainer.max_epochs=1"),
        ({"max_steps": None, "max_time_s": 0.05}, "trainer.max_time_s=0.05"),
        ({"max_steps": 100, "max_epochs": 1}, "trainer.max_epochs=1"),
    ],
)
def test_what_ended_a_training(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    options = tiny.options(**changes)
    trainer = make_trainer(options, [], tmp_path)
    trainer.fit(tiny.module(), tiny.loader())
    assert ended_by(trainer, options) == expected


def test_a_callback_that_ended_a_training_is_named(tmp_path: Path) -> None:
    options = tiny.options(max_steps=None)
    trainer = make_trainer(options, [], tmp_path)
    stopping = EarlyStopping("never", patience=1)
    trainer.callbacks.append(stopping)
    stopping.stopping_reason_message = "it did not improve. Signaling Trainer to stop."
    trainer.should_stop = True
    assert ended_by(trainer, options) == "EarlyStopping: it did not improve."
