"""A change of stage: the frozen encoder is trained, its table is freed, and all else goes on."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from tests.kit import encoded, tiny
from tests.kit.few import few
from tests.kit.ranks import train_ranks
from wellfed.train.lightning.module import StepModule

pytestmark = pytest.mark.filterwarnings("ignore::Warning:lightning")
STEPS = 4  # of an epoch


class Looks(pl.Callback):
    """A callback that records encoder, rates and micro-batch of each step, and scores around a change of stage."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.encoders: list[Tensor] = []
        self.sizes: list[int] = []
        self.scores: list[Tensor] = []
        self.states: list[set[Any]] = []
        self.rates: list[list[float]] = []
        begin = StepModule.begin_stage

        def scored(module: Any, *arguments: Any) -> Any:
            self.scores.append(scores_of(module))
            facts = begin(module, *arguments)
            if module._trainer is not None and module.step is not None:
                optimizer = module.trainer.optimizers[0]
                self.states.append({id(weight) for weight in optimizer.state})
                self.rates.append([group["lr"] for group in optimizer.param_groups])
            self.scores.append(scores_of(module))
            return facts

        monkeypatch.setattr(StepModule, "begin_stage", scored)

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.encoders.append(encoded.encoder_weights(module.model))
        self.sizes.append(module.step.passes.largest)


@torch.no_grad()
def scores_of(module: Any) -> Tensor:
    was_training = module.model.training
    module.model.eval()
    rows = module.plain.source().rows(torch.arange(encoded.NUM_ROWS, device=module.device))
    scores = module.model.head(rows)
    module.model.train(was_training)
    return scores


def trained(
    tmp_path: Path,
    looks: Sequence[pl.Callback] = (),
    checkpoint: Path | None = None,
    steps: int = 4 * STEPS,
    **more: Any,
) -> tuple[StepModule, pl.Trainer, list[dict[str, Any]]]:
    events: list[dict[str, Any]] = []
    module, stages = encoded.staged(lambda kind, **facts: events.append({"kind": kind, **facts}), **more)
    batches = tiny.loader(16, data=encoded.Rows())
    trainer = tiny.fit(module, tmp_path, [stages, *looks], checkpoint, batches, max_steps=steps)
    return module, trainer, events


def test_the_encoder_is_trained_from_its_stage_on_and_scores_are_the_same_at_the_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = Looks(monkeypatch)
    module, trainer, events = trained(tmp_path, [looks])
    before, after = looks.scores
    assert (before - after).abs().max() < 1e-5
    assert before.std() > 0.01
    first = looks.encoders[0]
    assert all(torch.equal(each, first) for each in looks.encoders[: 2 * STEPS])
    assert not torch.equal(looks.encoders[2 * STEPS], first)
    assert looks.sizes == [16] * 2 * STEPS + [8] * 2 * STEPS
    model = module.model
    assert looks.states == [{id(weight) for weight in model.parameters()}]  # allocated before the first batch
    assert looks.rates == [[pytest.approx(0.01 / (1 + 2 * STEPS))]]  # as the schedule has it by then
    counts = {int(state["step"]) for state in trainer.optimizers[0].state.values()}
    assert counts == {2 * STEPS, 4 * STEPS}  # the state that was there was left alone
    (event,) = (event for event in events if event["kind"] == "stage")
    assert event == {
        "kind": "stage",
        "step": 2 * STEPS,
        "epoch": 2,
        "features": "dynamic",
        "micro_batch": 8,
        "device_gib_before": None,
        "device_gib_after": None,
        "joined": first.numel(),
    }


def test_until_then_the_optimizer_keeps_nothing_for_it(tmp_path: Path) -> None:
    module, trainer, events = trained(tmp_path, steps=2 * STEPS)
    known = {id(weight) for weight in trainer.optimizers[0].state}
    assert known == {id(weight) for weight in module.model.head.parameters()}
    assert [event["kind"] for event in events] == []


@pytest.mark.parametrize("left_at", few([3, 2 * STEPS, 2 * STEPS + 3], 1))
def test_a_run_that_goes_on_before_at_or_after_the_change_ends_with_the_same_weights(
    tmp_path: Path, left_at: int
) -> None:
    whole, _, _ = trained(tmp_path)
    _, trainer, _ = trained(tmp_path, steps=left_at)
    trainer.save_checkpoint(tmp_path / "left.ckpt")
    resumed, trainer, events = trained(tmp_path, checkpoint=tmp_path / "left.ckpt")
    assert trainer.global_step == 4 * STEPS
    assert torch.equal(tiny.weights(resumed), tiny.weights(whole))
    assert [event["kind"] for event in events] == (["stage"] if left_at <= 2 * STEPS else [])


def test_rows_move_to_the_host_before_they_are_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Looks(monkeypatch)
    modes = ("cache", "cache_host", "dynamic")
    _, _, events = trained(tmp_path, [looks], steps=6 * STEPS, modes=modes, micro=(16, 16, 16))
    told = [(event["epoch"], event["features"], event["joined"] > 0) for event in events]
    assert told == [(2, "cache_host", False), (4, "dynamic", True)]
    for before, after in zip(looks.scores[::2], looks.scores[1::2], strict=True):
        assert (before - after).abs().max() < 1e-5
    assert torch.equal(looks.encoders[4 * STEPS - 1], looks.encoders[0])


def test_short_of_memory_a_frozen_encoder_is_not_computed_as_a_trained_one(tmp_path: Path) -> None:
    """Dynamic features would turn on the dropout of a frozen encoder, so the run ends instead."""
    module, _, _ = trained(tmp_path, steps=1, micro=(1, 1))
    assert module.plain.fallbacks.step_down() == {"change": "memory.features=cache_host"}
    assert module.plain.fallbacks.step_down() is None


@pytest.mark.simulated(cards=1, mib=512)
@pytest.mark.parametrize("mode", ["dynamic", "cache_host"])
def test_the_card_is_free_of_the_table(tmp_path: Path, mode: str) -> None:
    import fake_cuda

    events: list[Any] = []
    width, num_rows = 256, 64 * 1024  # a table of 64 MiB
    module, stages = encoded.staged(
        lambda kind, **facts: events.append(facts), ("cache", mode), width=width, num_rows=num_rows
    )
    tiny.fit(module, tmp_path, [stages], None, tiny.loader(16, data=encoded.Rows()), accelerator="gpu", max_steps=12)
    (event,) = events
    table_gib = 4 * width * num_rows / 2**30
    freed = event["device_gib_before"] - event["device_gib_after"]
    assert freed == pytest.approx(table_gib, rel=0.01)
    assert event["device_gib_after"] < 0.1 * table_gib
    assert torch.cuda.memory_reserved() < 4 * width * num_rows  # nor does torch keep the room
    assert fake_cuda.driver.violations() == []


@pytest.mark.slow
@pytest.mark.parametrize("retry", [True, False])
def test_ranks_sum_what_has_joined(tmp_path: Path, retry: bool) -> None:
    one, *_ = train_ranks(tmp_path / "one", 1, staged=True, micro=8, max_steps=4 * STEPS, retry=retry)
    two = train_ranks(tmp_path / "two", 2, staged=True, micro=8, max_steps=4 * STEPS, retry=retry, strategy="ddp")
    assert torch.equal(two[0]["weights"], two[1]["weights"])
    assert (two[0]["weights"] - one["weights"]).abs().max() < 1e-5
    assert [kind for kind, _ in two[1]["events"]] == ["stage"]
