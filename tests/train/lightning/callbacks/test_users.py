from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
)

from tests.kit import tiny
from tests.kit.few import few, slow
from wellfed.errors import ConfigError, WellfedError
from wellfed.observe.loggers.lightning_loggers import for_trainer
from wellfed.train.lightning import trainer as lit
from wellfed.train.lightning.callbacks.figures import Figures
from wellfed.train.lightning.callbacks.users import fault_of_callback, name_errors, steps_only
from wellfed.train.lightning.checkpoints.checkpoints import BeforeUsers, CheckpointOptions, Checkpoints
from wellfed.train.lightning.user_module.additions import make_user_trainer

pytestmark = pytest.mark.filterwarnings("ignore::Warning:lightning")


class Raises(pl.Callback):
    def on_train_batch_end(self, *_: Any) -> None:
        raise ValueError("mine")


def trained(
    folder: Path, users: list[pl.Callback], checkpoint: Path | None = None, **changes: Any
) -> tuple[pl.Trainer, Any, dict[str, float]]:
    """Trains with the user's callbacks as a run does; returns Trainer, module and the latest metrics."""
    figures = Figures(lambda split, values, **_: None, every=2, stop_on_nan=True)
    asked = CheckpointOptions(changes.pop("save_every", 1), None, 99, "loss", "min")
    kept = Checkpoints(folder, asked, figures.latest, lambda error, step: None)
    module = tiny.module(is_monitored=bool(users))
    trainer = make_user_trainer(
        tiny.options(**{"max_steps": None, "max_epochs": 3, **changes}),
        [figures, BeforeUsers(kept)],
        folder,
        users=users,
        last=[kept],
        loggers=for_trainer([], figures.logged, folder),
    )
    lit.fit(trainer, module, tiny.loader(), tiny.eval_loader(), checkpoint)
    return trainer, module, figures.latest


def test_an_error_says_whose_it_is(tmp_path: Path) -> None:
    callback = Raises()
    name_errors(callback, "callbacks.mine")
    name_errors(callback, "Raises")  # it has a name already
    with pytest.raises(ValueError, match="mine") as caught:
        trained(tmp_path, [callback])
    assert caught.value.__notes__ == ["In on_train_batch_end of the callback callbacks.mine (Raises)."]


def test_an_error_in_on_exception_does_not_hide_the_first(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class RaisesTwice(Raises):
        def on_exception(self, *_: Any) -> None:
            raise OSError("no connection")

    heard: list[BaseException] = []

    class Hears(pl.Callback):
        def on_exception(self, trainer: pl.Trainer, module: Any, exception: BaseException) -> None:
            heard.append(exception)

    callback = RaisesTwice()
    name_errors(callback, "callbacks.mine")
    with pytest.raises(ValueError, match="mine") as caught:
        trained(tmp_path, [callback, Hears()])
    assert heard == [caught.value]
    assert "on_exception of the callback callbacks.mine raised OSError: no connection." in caplog.text


def test_a_monitor_that_nobody_logs_is_told_with_what_there_is(tmp_path: Path) -> None:
    callback = EarlyStopping("val/x")
    name_errors(callback, "callbacks.stop")
    expected = r"callbacks.stop.monitor=val/x: no figure is called val/x. There are: train/loss, .*val/loss"
    with pytest.raises(WellfedError, match=expected):
        trained(tmp_path, [callback])


@pytest.mark.parametrize("every", [None, 2])
def test_early_stopping_goes_by_the_figures_of_a_plain_model(tmp_path: Path, every: int | None) -> None:
    stopping = EarlyStopping("val/loss", patience=1, min_delta=100.0)
    trainer, _, _ = trained(tmp_path, [stopping], max_epochs=9, validate_every_steps=every)
    assert trainer.global_step == (6 if every is None else 4)  # at the second validation


@pytest.mark.parametrize(
    ("every", "cut"),
    few(
        [
            *((None, cut) for cut in (2, 3)),  # within an epoch, at its end
            *((2, cut) for cut in (2, 5)),  # at a validation, between two
            *(slow(every, cut) for every, cut in ((None, 5), (None, 6), (2, 3), (2, 6))),
        ],
        2,
    ),
)
def test_a_resumed_average_and_patience_are_those_of_the_unbroken_run(
    tmp_path: Path, every: int | None, cut: int
) -> None:
    def users() -> list[pl.Callback]:
        return [EMAWeightAveraging(decay=0.5), EarlyStopping("val/loss", patience=3, min_delta=100.0)]

    trainer, module, _ = trained(tmp_path / "whole", users(), validate_every_steps=every)
    last = trainer.global_step
    checkpoint = tmp_path / "whole" / f"last-{last - cut}.ckpt"
    kept = torch.load(checkpoint, weights_only=True)
    assert kept["global_step"] == cut
    again, resumed, _ = trained(tmp_path / "cut", users(), checkpoint, validate_every_steps=every)
    assert again.global_step == last
    assert torch.equal(tiny.weights(module), tiny.weights(resumed))
    whole, cut_short = (torch.load(tmp_path / name / "last.ckpt", weights_only=True) for name in ("whole", "cut"))
    assert str(whole["callbacks"]) == str(cut_short["callbacks"])
    for part in ("state_dict", "current_model_state"):
        for name, value in whole[part].items():
            assert torch.equal(value, cut_short[part][name]), (part, name)


def test_an_average_is_validated_kept_and_left_in_the_module(tmp_path: Path) -> None:
    _, module, latest = trained(tmp_path, [EMAWeightAveraging(decay=0.5)], save_every=7)
    _, plain, _ = trained(tmp_path / "plain", [])
    last = torch.load(tmp_path / "last.ckpt", weights_only=True)
    now = torch.cat([last["current_model_state"][name].flatten() for name, _ in plain.named_parameters()])
    assert torch.equal(now, tiny.weights(plain)), "training goes on from the weights themselves"
    average = torch.cat([last["state_dict"][name].flatten() for name, _ in module.named_parameters()])
    assert torch.equal(average, tiny.weights(module))
    assert not torch.allclose(average, now)
    with torch.no_grad():
        losses = [float(module.model.loss(each.batch).loss) * each.size for each in tiny.eval_loader()]
    assert latest["val/loss"] == pytest.approx(sum(losses) / tiny.NUM_SAMPLES)


def test_training_goes_on_from_the_weights_where_they_are_averaged_no_longer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained(tmp_path / "averaged", [EMAWeightAveraging(decay=0.5)], max_epochs=2)
    _, resumed, _ = trained(tmp_path / "cut", [], tmp_path / "averaged" / "last.ckpt")
    _, plain, _ = trained(tmp_path / "plain", [])
    assert torch.equal(tiny.weights(resumed), tiny.weights(plain))
    assert "from here on they are not" in caplog.text


def test_of_a_timed_training_a_callback_hears_the_steps_alone(tmp_path: Path) -> None:
    average, stopping = EMAWeightAveraging(decay=0.5), EarlyStopping("val/loss")
    timed = steps_only([average, stopping])
    tiny.fit(tiny.module(), tmp_path, users=timed, max_steps=7)
    assert average._latest_update_step == 7
    assert steps_only([]) == []


def test_what_is_no_callback_is_told() -> None:
    problem, _ = fault_of_callback(object(), "auto") or ("", "")
    assert problem == "builtins.object is no callback."
    problem, _ = fault_of_callback(EMAWeightAveraging(), "fsdp") or ("", "")
    assert "averages whole weights" in problem
    assert fault_of_callback(EMAWeightAveraging(), "ddp") is None


@pytest.mark.parametrize(
    ("callback", "way_out"),
    [
        (GradientAccumulationScheduler({0: 2}), "memory.accumulate"),
        (StochasticWeightAveraging(0.1), "callbacks=ema"),
        (OnExceptionCheckpoint("."), "checkpoints/last.ckpt"),
    ],
)
def test_callbacks_that_do_not_do_here_what_they_promise_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, callback: pl.Callback, way_out: str
) -> None:
    monkeypatch.chdir(tmp_path)  # one of them saves its file there
    _, advice = fault_of_callback(callback, "auto") or ("", "")
    assert way_out in advice
    module = tiny.Lightnings(tiny.module())
    module.configure_callbacks = lambda: callback  # type: ignore[method-assign]
    trainer = make_user_trainer(tiny.options(max_steps=2), [], tmp_path, loggers=[])
    with pytest.raises(ConfigError, match=f"configure_callbacks.*{way_out}"):
        trainer.fit(module, tiny.loader())
