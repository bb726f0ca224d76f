"""Callbacks of plain models do what Lightning's do, by the same arguments."""

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch.optim.lr_scheduler import ReduceLROnPlateau

from tests.kit import loop, tiny
from wellfed.train.loop.callbacks import EarlyStopping, Ema, LrMonitor
from wellfed.train.plain_model.scheduling import Scheduling


class Lit(pl.LightningModule):
    """The tiny training by Lightning's own Trainer."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("seen", torch.zeros(()))

    def training_step(self, delivery: Any, batch_idx: int) -> Any:
        return self.model.loss(delivery.batch).loss

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return batch

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


@pytest.mark.filterwarnings("ignore::Warning:lightning")
@pytest.mark.parametrize("arguments", [{"decay": 0.5}, {"decay": 0.9, "update_every_n_steps": 2}])
def test_averages_are_those_of_lightning(tmp_path: Path, arguments: dict[str, Any]) -> None:
    torch.manual_seed(3)
    module = Lit(tiny.TinyModel())
    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    average = EMAWeightAveraging(**arguments)
    trainer = pl.Trainer(accelerator="cpu", max_steps=7, callbacks=[average], default_root_dir=tmp_path, **off)
    trainer.fit(module, tiny.loader())
    placed = loop.model()
    placed.lr_factor = lambda step: 1.0
    kept = loop.checkpoints(tmp_path)
    loop.fit(placed, callbacks={"ema": Ema(**arguments)}, checkpoints=kept, max_steps=7)
    expected = {name: value for name, value in module.state_dict().items() if name != "seen"}
    found = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert found["state_dict"].keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found["state_dict"][name], value), name
        assert torch.equal(placed.whole.state_dict()[name], value), "the average is tested"
        assert not torch.equal(found["current_model_state"][name], value)


def test_a_resumed_run_goes_on_with_weights_and_average(tmp_path: Path) -> None:
    def fit(folder: str, steps: int, checkpoint: Path | None = None) -> Any:
        kept, callbacks = loop.checkpoints(tmp_path / folder), {"ema": Ema(0.5), "lr": LrMonitor()}
        more = {"validation": tiny.eval_loader(), "checkpoints": kept, "callbacks": callbacks}
        loop.fit(loop.model(dropout=0.2), checkpoint=checkpoint, max_steps=steps, **more)
        state = torch.load(tmp_path / folder / "last.ckpt", weights_only=True)
        return loop.flat({name: state[name] for name in ("state_dict", "current_model_state", "callbacks")})

    whole = fit("whole", 7)
    fit("part", 4)
    assert fit("part", 7, tmp_path / "part" / "last.ckpt") == whole


def test_validations_are_of_the_average_and_training_is_not(tmp_path: Path) -> None:
    placed, without = loop.model(), loop.model()
    figures, alone = loop.figures(), loop.figures()
    more = {"validation": tiny.eval_loader(), "max_steps": 6}
    loop.fit(without, figures=alone, **more)
    training = loop.fit(placed, figures=figures, checkpoints=loop.checkpoints(tmp_path), **more, callbacks={"e": Ema()})
    current = torch.load(tmp_path / "last.ckpt", weights_only=True)["current_model_state"]
    assert training.number == 6
    trained = torch.cat([current[f"model.{name}"].flatten() for name, _ in without.model.named_parameters()])
    assert torch.equal(trained, loop.weights(without))
    assert figures.latest["val/loss"] != alone.latest["val/loss"]
    assert placed.evaluation.compute()["loss"] == figures.latest["val/loss"]


def asked(stopping: EarlyStopping, *values: float) -> list[str | None]:
    found = []
    for value in values:
        stopping.looked({"val/loss": value})
        found.append(stopping.ended_by)
    return found


@pytest.mark.parametrize(
    ("arguments", "values", "ends"),
    [
        ({"patience": 2}, (3.0, 2.0, 2.5, 2.0), (4, "did not improve in the last 2 validations. Best: 2.")),
        ({"patience": 1, "min_delta": 0.5}, (3.0, 2.8), (2, "did not improve")),
        ({"patience": 1, "mode": "max"}, (3.0, 3.5, 3.4), (3, "did not improve")),
        ({}, (3.0, float("nan")), (2, "val/loss is nan")),
        ({"patience": 0}, (3.0, 2.0, 2.5), (3, "did not improve")),
    ],
)
def test_when_it_stops_early(arguments: dict[str, Any], values: Any, ends: tuple[int, str]) -> None:
    told = asked(EarlyStopping("val/loss", **arguments), *values)
    assert [reason is not None for reason in told] == [number == ends[0] for number in range(1, len(values) + 1)]
    assert ends[1] in str(told[-1])


def test_a_training_ends_by_it_after_a_validation(tmp_path: Path) -> None:
    more = {"validation": tiny.eval_loader(), "checkpoints": loop.checkpoints(tmp_path)}
    stopping = EarlyStopping("val/loss", patience=1, min_delta=99.0)
    trained = loop.fit(loop.model(), callbacks={"early": stopping}, figures=loop.figures(), **more)
    assert (trained.number, trained.epoch) == (6, 2)
    assert str(trained.ended_by).startswith("EarlyStopping: val/loss did not improve in the last 1 validations.")
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["callbacks"]["early"]["waited"] == 1


def test_a_training_that_ended_early_makes_no_further_step_when_resumed(tmp_path: Path) -> None:
    def fit(patience: int, checkpoint: Path | None = None) -> Any:
        more = {"validation": tiny.eval_loader(), "checkpoints": loop.checkpoints(tmp_path), "figures": loop.figures()}
        stopping = EarlyStopping("val/loss", patience=patience, min_delta=99.0)
        return loop.fit(loop.model(), callbacks={"early": stopping}, checkpoint=checkpoint, **more)

    ended, last = fit(1), tmp_path / "last.ckpt"
    again = fit(1, last)
    assert (again.number, again.ended_by) == (ended.number, ended.ended_by) == (6, again.ended_by)
    assert fit(2, last).number == 9, "with more patience it goes on"


def test_a_validation_at_the_end_is_not_counted_by_a_longer_run(tmp_path: Path) -> None:
    """Eight steps are learned alike at once and in two halves, the first of which ends between two validations."""
    ends = []
    for name, stops in (("whole", [8]), ("halves", [4, 8])):
        last = None
        for stop in stops:
            make = partial(ReduceLROnPlateau, patience=1, threshold=99.0, threshold_mode="abs")
            placed = loop.model(scheduling=Scheduling(make, "step", "val/loss"), optimizer=torch.optim.SGD)
            stopping = EarlyStopping("val/loss", patience=9, min_delta=99.0)
            more = {"callbacks": {"early": stopping}, "figures": loop.figures(), "validation": tiny.eval_loader()}
            files = loop.checkpoints(tmp_path / name)
            loop.fit(placed, checkpoints=files, checkpoint=last, max_steps=stop, validate_every_steps=3, **more)
            last = tmp_path / name / "last.ckpt"
            best = torch.load(tmp_path / name / "best.ckpt", weights_only=True)
            assert best["global_step"] == stop, "it is picked by that validation, too"
        saved = torch.load(last, weights_only=True)
        ends.append([saved["callbacks"]["early"]["waited"], saved["lr_schedulers"][0]["num_bad_epochs"]])
        ends[-1].append(loop.weights(placed).tolist())
    assert ends[0] == ends[1]


def test_a_figure_that_is_not_there_is_named() -> None:
    more = {"callbacks": {"early": EarlyStopping("val_loss")}, "validation": tiny.eval_loader()}
    with pytest.raises(Exception, match=r"callbacks.early.monitor=val_loss: .* Set callbacks.early.monitor=val/loss"):
        loop.fit(loop.model(), figures=loop.figures(), **more)


def test_rates_are_in_the_rows_of_training() -> None:
    rows: list[dict[str, float]] = []
    loop.fit(loop.model(), figures=loop.figures(rows), callbacks={"lr": LrMonitor()}, max_steps=2)
    assert [row["lr-AdamW"] for row in rows] == [row["lr"] for row in rows]
