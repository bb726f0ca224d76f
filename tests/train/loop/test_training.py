"""The loop for plain models: its steps are those of a raw loop, and go on from any checkpoint."""

import random
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from tests.kit import loop, tiny
from tests.kit.few import slow
from wellfed.contract import LossOutput
from wellfed.data.own_loader import OwnLoader
from wellfed.errors import ConfigError, OutOfMemoryExhausted
from wellfed.process import Stopped, StopRequest
from wellfed.train.checkpoint_values import load
from wellfed.train.loop.training import Watchers
from wellfed.train.plain_model.scheduling import Schedule
from wellfed.train.step.non_finite import NonFiniteLoss


def oom_above(limit: int, calls: list[int] | None = None) -> Any:
    def fail(size: int, call: int) -> BaseException | None:
        if calls is not None:
            calls.append(size)
        return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB") if size > limit else None

    return fail


# -- the steps of a raw loop ------------------------------------------------------------------------------------------


def raw(steps: int, *, clip: float | None, every: int | None, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The same training in plain PyTorch, with evaluations in between; returns its weights."""
    placed, loader = loop.model(dropout=0.2), tiny.loader()
    model = placed.model.to(dtype)
    optimizer, schedule = torch.optim.AdamW(model.parameters(), lr=0.01), Schedule("cosine", 3, 0.1, 20)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    number = 0
    while number < steps:
        for delivery in islice(loader, steps - number):
            batch = {name: value.to(dtype or value.dtype) for name, value in delivery.batch.items()}
            optimizer.zero_grad()
            model.loss(batch).loss.backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            scheduler.step()
            number += 1
            if every is not None and number % every == 0:
                model.eval()
                with torch.no_grad():
                    [model.loss(one.batch) for one in tiny.eval_loader(8)]
                model.train()
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


@pytest.mark.parametrize(("clip", "every"), [(None, None), (0.05, 4)])
def test_weights_are_those_of_a_raw_loop_bit_for_bit(clip: float | None, every: int | None) -> None:
    expected, drawn = raw(11, clip=clip, every=every), torch.rand(3)
    placed = loop.model(dropout=0.2)
    validation = tiny.eval_loader(8)
    loop.fit(placed, gradient_clip=clip, max_steps=11, validate_every_steps=every, validation=validation)
    assert torch.equal(loop.weights(placed), expected)
    assert torch.equal(torch.rand(3), drawn)


def test_so_they_are_in_bf16() -> None:
    expected = raw(11, clip=0.05, every=None, dtype=torch.bfloat16)
    placed = loop.model(dropout=0.2)
    loop.fit(placed, gradient_clip=0.05, max_steps=11, precision="bf16-true")
    assert torch.equal(loop.weights(placed), expected)


@pytest.mark.parametrize("micro", [1, 5, 31, *map(slow, (8, 16))])
def test_splitting_a_step_leaves_the_weights_as_they_are(micro: int) -> None:
    whole, split = loop.model(micro=32), loop.model(micro=micro)
    loop.fit(whole, gradient_clip=0.5)
    loop.fit(split, gradient_clip=0.5)
    assert max(split.model.seen) == micro
    assert min(whole.model.seen) == 6  # the ragged last batch of an epoch took part
    assert (loop.weights(whole) - loop.weights(split)).abs().max() < 1e-5
    assert not torch.equal(loop.weights(whole), loop.weights(loop.model()))


def test_micro_losses_are_weighted_in_what_is_reported() -> None:
    rows: dict[int, list[dict[str, float]]] = {32: [], 8: []}
    for micro, into in rows.items():
        loop.fit(loop.model(micro=micro), figures=loop.figures(into), max_steps=6)
    assert len(rows[32]) == 6
    for whole, split in zip(rows[32], rows[8], strict=True):
        assert whole["loss"] == pytest.approx(split["loss"], abs=1e-6)
        assert whole["lr"] == split["lr"]


# -- out of memory, and losses that are no numbers -------------------------------------------------------------------


def test_out_of_memory_halves_the_micro_batch_and_does_the_same_batch_again() -> None:
    events: list[tuple[str, dict[str, Any]]] = []
    retried = loop.model(dropout=0.3, fail=oom_above(8), on_event=lambda kind, **facts: events.append((kind, facts)))
    told: list[dict[str, float]] = []
    loop.fit(retried, figures=loop.figures(told))
    by_hand, expected = loop.model(micro=8, dropout=0.3), []
    loop.fit(by_hand, figures=loop.figures(expected))
    assert retried.micro.tried == [32, 16, 8]
    assert torch.equal(loop.weights(retried), loop.weights(by_hand))  # dropout masks included
    assert told == expected  # a step that is done again is reported once
    assert [kind for kind, _ in events] == ["oom", "step_down", "oom", "step_down"]
    assert events[1][1] == {"step": 1, "micro_batch": 16, "before": 32}


def test_on_oom_fail_does_not_retry() -> None:
    calls: list[int] = []
    with pytest.raises(OutOfMemoryExhausted):
        loop.fit(loop.model(fail=oom_above(8, calls), on_oom="fail"))
    assert calls == [32]


class SometimesNan(tiny.TinyModel):
    def loss(self, batch: Any) -> LossOutput:
        output = super().loss(batch)
        return LossOutput(output.loss * float("nan")) if self.calls in (4, 5) else output


def test_on_nan_skip_leaves_such_steps_out() -> None:
    events: list[str] = []
    torch.manual_seed(3)
    placed = loop.model(model=SometimesNan(), on_nan="skip", on_event=lambda kind, **facts: events.append(kind))
    after: list[torch.Tensor] = []
    keep = loop.After(lambda step: after.append(loop.weights(placed).clone()))
    loop.fit(placed, callbacks={"keep": keep}, max_steps=8)
    assert events == ["nan", "nan"]
    assert torch.equal(after[2], after[4])  # steps 4 and 5 moved nothing
    assert not torch.equal(after[4], after[5])
    assert torch.isfinite(after[-1]).all()


def test_on_nan_raise_stops_at_the_next_row() -> None:
    torch.manual_seed(3)
    with pytest.raises(NonFiniteLoss, match=r"within the steps 4 to 6; .*trainer.gradient_clip=1.0"):
        loop.fit(loop.model(model=SometimesNan()), figures=loop.figures(every=3))


def test_no_checkpoint_has_weights_that_are_no_numbers(tmp_path: Path) -> None:
    torch.manual_seed(3)
    kept = loop.checkpoints(tmp_path, every_steps=2)
    with pytest.raises(NonFiniteLoss, match="within the steps 3 to 4") as caught:
        loop.fit(loop.model(model=SometimesNan()), checkpoints=kept)
    assert "last.ckpt of step 2 is good" in caught.value.__notes__[0]
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 2


# -- checkpoints -----------------------------------------------------------------------------------------------------


class DrawsEverywhere(tiny.TinyModel):
    """A model that draws from all three generators."""

    def loss(self, batch: Any) -> LossOutput:
        output = super().loss(batch)
        return LossOutput(output.loss * (1 + random.random() + np.random.rand() + torch.rand(())))


def dies_after(number: int) -> loop.After:
    """A callback that raises after a number of steps, as a kill would."""

    def die(step: int) -> None:
        if step == number:
            raise KeyError("killed")

    return loop.After(die)


@pytest.mark.parametrize("limits", [{"max_epochs": 3, "max_steps": None}, {"max_steps": 8}])
@pytest.mark.parametrize("every", [None, 1, 3])
@pytest.mark.parametrize("dies", [4, 6, 7])
def test_from_any_checkpoint_of_a_killed_run_the_rest_is_the_same(
    tmp_path: Path, limits: dict[str, int | None], every: int | None, dies: int
) -> None:
    """Trains with 3 steps an epoch. ``every=None`` saves at the end of an epoch, as the default does."""

    def fresh() -> Any:
        random.seed(5)
        np.random.seed(5)
        torch.manual_seed(5)
        return loop.model(model=DrawsEverywhere(dropout=0.2))

    def rows(into: dict[int, float]) -> Any:
        from wellfed.train.loop.figures import Figures

        take = lambda split, values, step, **_: into.update({step: values["loss"]})  # noqa: E731
        return Figures(take, every=2, stops_on_nan=False)

    whole, expected = fresh(), {}
    until = loop.fit(whole, figures=rows(expected), **limits)
    kept = loop.checkpoints(tmp_path / "checkpoints", every_steps=every)
    with pytest.raises(KeyError):
        loop.fit(fresh(), figures=rows({}), checkpoints=kept, callbacks={"dies": dies_after(dies)}, **limits)
    rest, found = fresh(), {}
    torch.manual_seed(99)
    checkpoint = tmp_path / "checkpoints" / "last.ckpt"
    trained = loop.fit(rest, figures=rows(found), checkpoint=checkpoint, **limits)
    assert (trained.number, trained.epoch) == (until.number, until.epoch)
    assert torch.equal(loop.weights(whole), loop.weights(rest))
    assert found == {step: expected[step] for step in found}
    assert set(found) >= {step for step in expected if step > dies}


def test_checkpoints_hold_what_the_contract_says_and_load_weights_only(tmp_path: Path) -> None:
    loop.fit(loop.model(), checkpoints=loop.checkpoints(tmp_path), max_steps=4)
    state = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert state["global_step"] == 4
    assert state["position"] == {"epoch": 1, "batch": 1}
    assert set(state["rng"]) == {"torch", "cuda", "numpy", "python"}
    assert all(name.startswith("model.") for name in state["state_dict"])


def test_a_checkpoint_without_its_state_is_one_message(tmp_path: Path) -> None:
    loop.fit(loop.model(), checkpoints=loop.checkpoints(tmp_path), max_steps=4)
    state = torch.load(tmp_path / "last.ckpt", weights_only=True)
    torch.save({**state, "rng_of_ranks": []}, tmp_path / "odd.ckpt")
    with pytest.raises(ConfigError, match="its state can't be restored"):
        loop.fit(loop.model(), checkpoint=tmp_path / "odd.ckpt")


def test_a_resumed_run_that_is_given_more_steps_goes_on_by_the_longer_schedule(tmp_path: Path) -> None:
    def with_total(total: int) -> Any:
        placed = loop.model()
        placed.lr_factor = Schedule("cosine", 0, 0.0, total)
        return placed

    loop.fit(with_total(4), checkpoints=loop.checkpoints(tmp_path), max_steps=4)
    before = torch.load(tmp_path / "last.ckpt", weights_only=True)
    rows: list[dict[str, float]] = []
    loop.fit(with_total(8), figures=loop.figures(rows), checkpoint=tmp_path / "last.ckpt", max_steps=8)
    assert before["optimizer_states"][0]["param_groups"][0]["lr"] == pytest.approx(0)
    rates = [0.01 * Schedule("cosine", 0, 0.0, 8)(step) for step in (5, 6, 7, 8)]
    assert [row["lr"] for row in rows] == pytest.approx(rates)


class InOrder(IterableDataset[Any]):
    """A stream of the samples of `tiny.TinyData`, of unknown length."""

    def __iter__(self) -> Any:
        data = tiny.TinyData()
        return (data[index] for index in range(tiny.NUM_SAMPLES))


class OneByOne(tiny.TinyData):
    """The same data with an index."""

    fetch: Any = None


def test_epochs_of_a_stream_end_as_those_of_known_length_and_are_gone_on_with(tmp_path: Path) -> None:
    """Validations come at the ends of epochs; a checkpoint of any step resumes with the next."""

    def fit(folder: str, batches: Any, checkpoint: Path | None = None) -> Any:
        placed, told = loop.model(dropout=0.2), list[Any]()
        kept = loop.checkpoints(tmp_path / folder, every_steps=1, keep_last=99)
        figures, more = loop.figures(told), {"max_epochs": 2, "max_steps": None, "validation": tiny.eval_loader(8)}
        trained = loop.fit(placed, batches, checkpoint=checkpoint, checkpoints=kept, figures=figures, **more)
        return loop.weights(placed), told, trained.number

    expected = fit("known", OwnLoader(DataLoader(OneByOne(), 32)))
    found = fit("stream", OwnLoader(DataLoader(InOrder(), 32)))
    assert found[0].equal(expected[0])
    assert found[1:] == expected[1:]
    for age in range(6):
        checkpoint = tmp_path / "stream" / ("last.ckpt" if age == 0 else f"last-{age}.ckpt")
        again = fit(str(age), OwnLoader(DataLoader(InOrder(), 32)), checkpoint)
        assert again[0].equal(expected[0]), age
        assert again[2] == expected[2]


# -- limits and stops ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "ends"),
    [
        ({"max_epochs": 2, "max_steps": None}, (6, 2, "trainer.max_epochs=2")),
        ({"max_epochs": 3, "max_steps": 7}, (7, 2, "trainer.max_steps=7")),
        ({"max_steps": None, "max_time_s": 0.0}, (1, 0, "trainer.max_time_s=0")),
    ],
)
def test_a_run_ends_at_its_first_limit_and_is_validated(limits: dict[str, Any], ends: Any) -> None:
    figures = loop.figures()
    trained = loop.fit(loop.model(), figures=figures, validation=tiny.eval_loader(8), **limits)
    assert (trained.number, trained.epoch, trained.ended_by) == ends
    assert figures.validated_step == trained.number


def test_an_evaluation_at_the_end_leaves_generators_as_they_are(tmp_path: Path) -> None:
    """So a run of five steps that is given six more is the run of eleven."""

    class Draws(tiny.TinyModel):
        def loss(self, batch: Any) -> LossOutput:
            torch.rand(3)
            return super().loss(batch)

    placed, more = {}, {"validation": tiny.eval_loader(8), "validate_every_steps": 9}
    for name, steps in (("whole", 11), ("part", 5), ("rest", 11)):
        torch.manual_seed(3)
        placed[name], kept = loop.model(model=Draws(0.2)), loop.checkpoints(tmp_path / name)
        checkpoint = tmp_path / "part" / "last.ckpt" if name == "rest" else None
        loop.fit(placed[name], checkpoints=kept, checkpoint=checkpoint, max_steps=steps, **more)
    assert torch.equal(loop.weights(placed["whole"]), loop.weights(placed["rest"]))


@pytest.mark.parametrize("asked", [1, 3, 4])
def test_a_signal_ends_the_run_after_its_step_which_is_saved(tmp_path: Path, asked: int) -> None:
    stop = StopRequest()

    def ask(step: int) -> None:
        if step == asked:
            stop.signum = 15

    kept, figures = loop.checkpoints(tmp_path), loop.figures()
    more = {"callbacks": {"ask": loop.After(ask)}, "validation": tiny.eval_loader(8), "stop": stop}
    with pytest.raises(Stopped):
        loop.fit(loop.model(), checkpoints=kept, figures=figures, **more)
    assert kept.last_step == asked
    assert figures.validated_step == (3 if asked == 3 else None if asked < 3 else 3)  # an epoch has three steps
    assert not stop.is_stepping


class Broken(tiny.TinyData):
    """Data whose fifth batch can't be read."""

    reads = 0

    def fetch(self, indices: torch.Tensor, rng: Any) -> Any:
        self.reads += 1
        if self.reads == 5:
            raise OSError("no such sample")
        return super().fetch(indices, rng)


def test_an_error_between_two_steps_leaves_the_state_after_the_last(tmp_path: Path) -> None:
    kept = loop.checkpoints(tmp_path)
    with pytest.raises(Exception, match="no such sample"):
        loop.fit(loop.model(), tiny.loader(data=Broken()), checkpoints=kept)
    assert kept.last_step == 4


class CountsItself(tiny.TinyModel):
    """A model that counts two samples a row."""

    def loss(self, batch: Any) -> LossOutput:
        return LossOutput(super().loss(batch).loss, num_samples=2 * len(batch["x"]))


def test_each_step_is_reported_with_its_epochs_and_samples() -> None:
    told: list[Any] = []
    watchers = Watchers(on_step=lambda *about: told.append(about))
    loop.fit(loop.model(model=CountsItself(), micro=8), watchers=watchers, steps_per_epoch=3, max_steps=4)
    assert told == [
        (1, pytest.approx(1 / 3), 64),
        (2, pytest.approx(2 / 3), 64),
        (3, 1.0, 12),
        (4, pytest.approx(4 / 3), 64),
    ]


class TwoLayers(nn.Module):
    """Two layers, of which the first may be frozen."""

    def __init__(self, *, trains_first: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(tiny.WIDTH, 4), nn.Linear(4, 1)
        self.first.requires_grad_(trains_first)

    def loss(self, batch: Any) -> LossOutput:
        return LossOutput(self.second(self.first(batch["x"])).square().mean())


def test_where_more_weights_are_trained_the_optimizer_begins_without_a_state(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def adam(weights: Any, lr: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW([weight for weight in weights if weight.requires_grad], lr=lr)

    for stop, trains_first in ((3, False), (5, True)):
        last = tmp_path / "last.ckpt"
        placed = loop.model(model=TwoLayers(trains_first=trains_first), optimizer=adam)  # type: ignore[arg-type]
        files = loop.checkpoints(tmp_path)
        loop.fit(placed, checkpoints=files, checkpoint=last if last.exists() else None, max_steps=stop)
    state = load(last)["optimizer_states"][0]["state"]
    assert {number: int(each["step"]) for number, each in state.items()} == dict.fromkeys(range(4), 2)
    assert "the optimizer begins without a state" in caplog.text
