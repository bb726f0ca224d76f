import random
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision

from tests.kit import tiny
from tests.kit.few import slow
from wellfed.contract import LossOutput
from wellfed.errors import OutOfMemoryExhausted
from wellfed.observe.telemetry.run_progress import Progress
from wellfed.train.lightning.callbacks.figures import Figures
from wellfed.train.lightning.module import StepModule
from wellfed.train.step.non_finite import NonFiniteLoss

pytestmark = pytest.mark.filterwarnings("ignore::Warning:lightning")


@pytest.mark.parametrize("micro", [1, 5, 31, *map(slow, (8, 16))])
def test_splitting_a_step_leaves_the_weights_as_they_are(tmp_path: Path, micro: int) -> None:
    whole, split = tiny.module(micro=32), tiny.module(micro=micro)
    tiny.fit(whole, tmp_path, gradient_clip=0.5)
    tiny.fit(split, tmp_path, gradient_clip=0.5)
    assert max(split.model.seen) == micro
    assert min(whole.model.seen) == 6  # the ragged last batch of an epoch took part
    assert (tiny.weights(whole) - tiny.weights(split)).abs().max() < 1e-5
    assert not torch.equal(tiny.weights(whole), tiny.weights(tiny.module()))


def fit_scaled(module: Any, folder: Path, **more: Any) -> MixedPrecision:
    """Trains with a gradient scaler, by Lightning's own Trainer."""
    plugin = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=2.0**12))
    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = pl.Trainer(plugins=[plugin], accelerator="cpu", default_root_dir=str(folder), **off, **more)
    trainer.fit(module, tiny.loader())
    return plugin


def test_splitting_under_a_gradient_scaler_leaves_the_weights_as_they_are(tmp_path: Path) -> None:
    results = []
    for micro in (32, 8):
        module = tiny.module(micro=micro)
        plugin = fit_scaled(module, tmp_path, max_steps=20, gradient_clip_val=0.5)
        assert plugin.scaler.get_scale() > 1
        results.append(tiny.weights(module))
    # fp16 rounds each micro-batch's activations alike, its gradients differently: 88 % where backward skips the scaler.
    assert (results[0] - results[1]).norm() / results[0].norm() < 5e-3


def test_micro_losses_are_weighted_in_what_is_reported(tmp_path: Path) -> None:
    rows: dict[int, list[dict[str, float]]] = {}
    for micro in (32, 8):
        rows[micro] = []
        figures = Figures(
            lambda split, values, micro=micro, **_: rows[micro].append(dict(values)), every=1, stop_on_nan=True
        )
        tiny.fit(tiny.module(micro=micro), tmp_path, [figures], max_steps=6)
    assert len(rows[32]) == 6
    for whole, split in zip(rows[32], rows[8], strict=True):
        assert whole["loss"] == pytest.approx(split["loss"], abs=1e-6)
        assert whole["lr"] == split["lr"]


def oom_above(limit: int, calls: list[int] | None = None) -> Any:
    def fail(size: int, call: int) -> BaseException | None:
        if calls is not None:
            calls.append(size)
        return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB") if size > limit else None

    return fail


def test_out_of_memory_halves_the_micro_batch_and_does_the_same_batch_again(tmp_path: Path) -> None:
    events: list[tuple[str, dict[str, Any]]] = []
    retried = tiny.module(
        micro=32, dropout=0.3, fail=oom_above(8), on_event=lambda kind, **facts: events.append((kind, facts))
    )
    tiny.fit(retried, tmp_path)
    by_hand = tiny.module(micro=8, dropout=0.3)
    tiny.fit(by_hand, tmp_path)
    assert retried.plain.micro.tried == [32, 16, 8]
    assert torch.equal(tiny.weights(retried), tiny.weights(by_hand))  # dropout masks included
    assert [kind for kind, _ in events] == ["oom", "step_down", "oom", "step_down"]
    assert events[1][1] == {"step": 1, "micro_batch": 16, "before": 32}


def test_a_step_done_again_is_reported_once(tmp_path: Path) -> None:
    rows: list[dict[str, float]] = []
    figures = Figures(lambda split, values, **_: rows.append(dict(values)), every=1, stop_on_nan=True)
    tiny.fit(tiny.module(fail=oom_above(20)), tmp_path, [figures], max_steps=2)
    reference: list[dict[str, float]] = []
    figures = Figures(lambda split, values, **_: reference.append(dict(values)), every=1, stop_on_nan=True)
    tiny.fit(tiny.module(micro=16), tmp_path, [figures], max_steps=2)
    assert rows == reference


def test_on_oom_fail_does_not_retry(tmp_path: Path) -> None:
    calls: list[int] = []
    with pytest.raises(OutOfMemoryExhausted):
        tiny.fit(tiny.module(fail=oom_above(8, calls), on_oom="fail"), tmp_path)
    assert calls == [32]


class SometimesNan(tiny.TinyModel):
    def loss(self, batch: Any) -> LossOutput:
        output = super().loss(batch)
        return LossOutput(output.loss * float("nan")) if self.calls in (4, 5) else output


class WeightsAfter(pl.Callback):
    """Callback that keeps the weights after each step."""

    def __init__(self) -> None:
        self.weights: list[torch.Tensor] = []

    def on_train_batch_end(self, trainer: Any, module: StepModule, *_: Any) -> None:
        self.weights.append(tiny.weights(module).clone())


def test_on_nan_skip_leaves_such_steps_out(tmp_path: Path) -> None:
    events: list[str] = []
    torch.manual_seed(3)
    module = tiny.module(model=SometimesNan(), on_nan="skip", on_event=lambda kind, **facts: events.append(kind))
    after = WeightsAfter()
    tiny.fit(module, tmp_path, [after], max_steps=8)
    assert events == ["nan", "nan"]
    assert torch.equal(after.weights[2], after.weights[4])  # steps 4 and 5 moved nothing
    assert not torch.equal(after.weights[4], after.weights[5])
    assert torch.isfinite(after.weights[-1]).all()


def test_on_nan_raise_stops_at_the_next_row(tmp_path: Path) -> None:
    figures = Figures(lambda *_, **__: None, every=3, stop_on_nan=True)
    torch.manual_seed(3)
    with pytest.raises(NonFiniteLoss, match=r"within the steps 4 to 6\..*trainer.gradient_clip=1.0"):
        tiny.fit(tiny.module(model=SometimesNan()), tmp_path, [figures])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own, on its way to inductor
def test_a_compile_that_fails_goes_on_eagerly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor.config as inductor

    monkeypatch.setattr(inductor.cpp, "cxx", ("/no/such/compiler",))
    monkeypatch.setattr(inductor, "force_disable_caches", True)
    events: list[tuple[str, dict[str, Any]]] = []
    module = tiny.module(compile_mode="default", on_event=lambda kind, **facts: events.append((kind, facts)))
    told = tiny.Steps()
    tiny.fit(module, tmp_path, [told], max_steps=4)
    assert [kind for kind, _ in events] == ["compile_failed"]
    assert "compiler" in events[0][1]["message"].lower()
    assert told.was_disturbed  # its time is no figure
    reference = tiny.module()
    tiny.fit(reference, tmp_path, max_steps=4)
    assert torch.equal(tiny.weights(module), tiny.weights(reference))


class DrawsEverywhere(tiny.TinyModel):
    """A model that draws from all three generators."""

    def loss(self, batch: Any) -> LossOutput:
        output = super().loss(batch)
        return LossOutput(output.loss * (1 + random.random() + np.random.rand() + torch.rand(())))


class Dies(pl.Callback):
    """A callback that raises after a number of steps, as a kill would."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self._step:
            raise KeyError("killed")


@pytest.mark.parametrize(
    "limits",
    [
        {"max_epochs": 3},
        slow({"max_epochs": 3, "max_steps": 8}),  # each alone is tried beside it
        {"max_steps": 8},
    ],
)
@pytest.mark.parametrize("every", [None, 1, 3])
@pytest.mark.parametrize("dies", [4, 6, 7])
def test_from_any_checkpoint_of_a_killed_run_the_rest_is_the_same(
    tmp_path: Path, limits: dict[str, int], every: int | None, dies: int
) -> None:
    """Trains with 3 steps an epoch. ``every=None`` saves at the end of an epoch, as the default does."""

    def fresh() -> StepModule:
        random.seed(5)
        np.random.seed(5)
        torch.manual_seed(5)
        return tiny.module(model=DrawsEverywhere(dropout=0.2))

    def rows(into: dict[int, float]) -> Figures:
        take = lambda split, values, step, **_: into.update({step: values["loss"]})  # noqa: E731
        return Figures(take, every=2, stop_on_nan=False)

    changes = {"max_epochs": None, "max_steps": None, **limits}
    whole, expected = fresh(), {}
    until = tiny.fit(whole, tmp_path, [rows(expected)], **changes)
    part, found = fresh(), {}
    checkpoints = tiny.checkpoints(tmp_path / "checkpoints", every_steps=every)
    with pytest.raises(KeyError):
        tiny.fit(part, tmp_path, [rows({}), checkpoints, Dies(dies)], **changes)
    rest = fresh()
    torch.manual_seed(99)
    kept = tiny.checkpoints(tmp_path / "rest")
    trainer = tiny.fit(
        rest, tmp_path, [rows(found), kept], checkpoint=tmp_path / "checkpoints" / "last.ckpt", **changes
    )
    assert (trainer.global_step, trainer.current_epoch) == (until.global_step, until.current_epoch)
    assert torch.equal(tiny.weights(whole), tiny.weights(rest))
    assert found == {step: expected[step] for step in found}
    assert set(found) >= {step for step in expected if step > dies}


def test_checkpoints_hold_what_the_contract_says_and_load_weights_only(tmp_path: Path) -> None:
    tiny.fit(tiny.module(), tmp_path, [tiny.checkpoints(tmp_path)], max_steps=4)
    state = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert state["global_step"] == 4
    assert state["position"] == {"epoch": 1, "batch": 1}
    assert set(state["rng"]) == {"torch", "cuda", "numpy", "python"}
    assert all(name.startswith("model.") for name in state["state_dict"])


class CountsItself(tiny.TinyModel):
    """A model that counts two samples a row."""

    def loss(self, batch: Any) -> LossOutput:
        return LossOutput(super().loss(batch).loss, num_samples=2 * len(batch["x"]))


def test_a_model_may_count_its_own_samples(tmp_path: Path) -> None:
    from wellfed.train.lightning.callbacks.progress import ProgressReport

    told: list[int] = []
    counts = ProgressReport(Progress(), lambda: None, lambda steps, epochs, samples: told.append(samples), 3)
    tiny.fit(tiny.module(model=CountsItself(), micro=8), tmp_path, [counts], max_steps=3)
    assert told == [64, 64, 12]


class NanInFirstPart(tiny.TinyModel):
    """A model whose first of two micro-batches of step 2 has a NaN loss."""

    def loss(self, batch: Any) -> LossOutput:
        output = super().loss(batch)
        return LossOutput(output.loss * float("nan")) if self.calls == 3 else output


def test_a_micro_batch_that_is_no_number_leaves_the_whole_step_out(tmp_path: Path) -> None:
    events: list[tuple[str, dict[str, Any]]] = []
    torch.manual_seed(3)
    module = tiny.module(
        model=NanInFirstPart(), micro=16, on_nan="skip", on_event=lambda kind, **facts: events.append((kind, facts))
    )
    rows: list[dict[str, float]] = []
    figures = Figures(lambda split, values, **_: rows.append(dict(values)), every=2, stop_on_nan=False)
    tiny.fit(module, tmp_path, [figures], max_steps=2)
    assert events == [("nan", {"step": 2, "action": "skip"})]
    assert torch.isfinite(tiny.weights(module)).all()
    alone: list[dict[str, float]] = []
    torch.manual_seed(3)
    first = Figures(lambda split, values, **_: alone.append(dict(values)), every=1, stop_on_nan=False)
    tiny.fit(tiny.module(model=NanInFirstPart(), micro=16), tmp_path, [first], max_steps=1)
    assert rows[0]["loss"] == pytest.approx(alone[0]["loss"])  # the mean over the steps that counted


def test_a_resumed_run_that_is_given_more_steps_goes_on_by_the_longer_schedule(tmp_path: Path) -> None:
    from wellfed.train.plain_model.scheduling import Schedule

    def with_total(total: int) -> StepModule:
        module = tiny.module()
        module.plain.lr_factor = Schedule("cosine", 0, 0.0, total)
        return module

    tiny.fit(with_total(4), tmp_path, [tiny.checkpoints(tmp_path)], max_steps=4)
    before = torch.load(tmp_path / "last.ckpt", weights_only=True)
    rates: list[float] = []

    class Watch(pl.Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    longer = with_total(8)
    tiny.fit(longer, tmp_path, [Watch()], checkpoint=tmp_path / "last.ckpt", max_steps=8)
    assert before["optimizer_states"][0]["param_groups"][0]["lr"] == pytest.approx(0)
    assert rates == pytest.approx([0.01 * Schedule("cosine", 0, 0.0, 8)(step) for step in (4, 5, 6, 7)])


def test_a_step_is_left_out_under_a_gradient_scaler_too(tmp_path: Path) -> None:
    events: list[str] = []
    torch.manual_seed(3)
    module = tiny.module(model=SometimesNan(), on_nan="skip", on_event=lambda kind, **facts: events.append(kind))
    after = WeightsAfter()
    fit_scaled(module, tmp_path, callbacks=[after], max_steps=8)
    assert events == ["nan", "nan"]
    assert torch.equal(after.weights[2], after.weights[4])
    assert not torch.equal(after.weights[4], after.weights[-1])
    assert torch.isfinite(after.weights[-1]).all()


@pytest.mark.slow
def test_a_run_that_stepped_down_goes_on_with_its_size(tmp_path: Path) -> None:
    """A resume does not try the failed size again, and has the same weights bit for bit."""

    def no_room(size: int, calls: int) -> BaseException | None:
        return torch.OutOfMemoryError("CUDA out of memory.") if size > 8 and calls > 3 else None

    events: list[str] = []

    def trained(folder: Path, fail: Any, checkpoint: Path | None, steps: int) -> torch.Tensor:
        module = tiny.module(fail=fail, dropout=0.2, on_event=lambda kind, **_: events.append(kind))
        tiny.fit(module, folder, [tiny.checkpoints(folder)], checkpoint=checkpoint, max_steps=steps)
        return tiny.weights(module)

    unbroken = trained(tmp_path / "one", no_room, None, 9)
    trained(tmp_path / "two", no_room, None, 5)
    events.clear()
    resumed = trained(tmp_path / "two", None, tmp_path / "two" / "last.ckpt", 9)  # there would be room for more now
    assert torch.equal(resumed, unbroken)
    assert events == []
