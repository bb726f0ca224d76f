"""Direct steps do what Lightning's own do: weights, checkpoints, what callbacks hear."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision

from tests.lit import tiny
from tests.lit.test_module import SometimesNan, oom_above
from wellfed.lit import loop
from wellfed.lit import trainer as lit

pytestmark = pytest.mark.filterwarnings("ignore::Warning:lightning")
HOOKS = ["setup", "on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start"]
HOOKS += ["on_train_batch_end", "on_validation_start", "on_validation_batch_end", "on_validation_end"]
HOOKS += ["on_train_epoch_end", "on_save_checkpoint", "on_train_end", "on_fit_end", "teardown"]


class Listens(pl.Callback):
    """Has a hook within the step, which only Lightning's own step calls."""

    def on_before_zero_grad(self, *_: Any) -> None:
        pass


class Direct(pl.Callback):
    """Whether the steps were direct."""

    def __init__(self) -> None:
        self.was: list[bool] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.was.append(trainer.fit_loop.epoch_loop._is_direct)


class Stops(pl.Callback):
    """Ends the run early, as Lightning's EarlyStopping and Timer do."""

    def __init__(self, step: int | None) -> None:
        self._step = step

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        trainer.should_stop = trainer.should_stop or trainer.global_step == self._step


class Hears(pl.Callback):
    """What callbacks are told, and what they could look up at that time."""

    def __init__(self) -> None:
        self.heard: list[tuple[Any, ...]] = []


def note(self: Hears, hook: str, trainer: Any, module: Any, *more: Any) -> None:
    state = trainer.global_step, trainer.current_epoch, trainer.is_last_batch, trainer.training
    if hook.startswith("on_train_batch"):
        more = tuple(one if isinstance(one, int) else one["loss"].item() for one in more if type(one) in (int, dict))
        state = *state, trainer.optimizers[0].param_groups[0]["lr"], module._current_fx_name
    else:
        more = ()
    self.heard.append((hook, *state, *more))


for hook in HOOKS:
    setattr(Hears, hook, lambda self, *more, hook=hook, **_: note(self, hook, *more))


def both(
    tmp_path: Path, make: Any = tiny.module, stops: int | None = None, **changes: Any
) -> list[tuple[torch.Tensor, dict[str, Any], Any]]:
    """Weights, checkpoint and what was heard, first of direct steps, then of Lightning's."""
    results = []
    for number, more in enumerate(([], [Listens()])):
        hears, direct = Hears(), Direct()
        module = make()
        trainer = lit.make_trainer(tiny.options(**changes), [hears, direct, Stops(stops), *more], tmp_path)
        lit.fit(trainer, module, tiny.loader(), tiny.eval_loader(8), None)
        assert set(direct.was) == {not more}
        trainer.save_checkpoint(tmp_path / f"{number}.ckpt")
        results.append((tiny.weights(module), torch.load(tmp_path / f"{number}.ckpt", weights_only=True), hears.heard))
    return results


def flat(state: Any, name: str = "") -> dict[str, Any]:
    """Leaves of a checkpoint by their path."""
    if isinstance(state, dict):
        return {path: leaf for key, item in state.items() for path, leaf in flat(item, f"{name}/{key}").items()}
    if isinstance(state, (list, tuple)):
        return flat(dict(enumerate(state)), name)
    return {name: state.tolist() if isinstance(state, torch.Tensor) else state}


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("micro", [32, 8])
def test_a_run_is_the_same_bit_for_bit(tmp_path: Path, precision: str, clip: float | None, micro: int) -> None:
    changes = {"precision": precision, "gradient_clip": clip, "max_steps": 11, "validate_every_steps": 4}
    ours, lightnings = both(tmp_path, lambda: tiny.module(micro=micro, dropout=0.2), **changes)
    assert torch.equal(ours[0], lightnings[0])
    assert flat(ours[1]) == flat(lightnings[1])
    assert ours[2] == lightnings[2]
    assert {told[0] for told in ours[2]} >= set(HOOKS) - {"on_save_checkpoint"}


@pytest.mark.parametrize(
    "changes",
    [{"max_epochs": 2, "max_steps": None}, {"max_epochs": 3, "max_steps": 7}, {"max_steps": 20, "stops": 5}],
)
def test_a_run_ends_where_lightnings_ends(tmp_path: Path, changes: dict[str, Any]) -> None:
    ours, lightnings = both(tmp_path, **changes)
    assert flat(ours[1]) == flat(lightnings[1])
    assert ours[2] == lightnings[2]


def test_out_of_memory_and_steps_that_are_no_number_are_the_same(tmp_path: Path) -> None:
    for make in (
        lambda: tiny.module(dropout=0.3, fail=oom_above(8)),
        lambda: tiny.module(model=SometimesNan(), on_nan="skip"),
        lambda: tiny.module(model=SometimesNan(), on_nan="halve_lr"),
    ):

        def seeded(make: Any = make) -> Any:
            torch.manual_seed(3)
            return make()

        ours, lightnings = both(tmp_path, seeded, max_steps=8, gradient_clip=0.5)
        assert torch.equal(ours[0], lightnings[0])
        assert flat(ours[1]) == flat(lightnings[1])


@pytest.mark.parametrize(("first", "then"), [([], [Listens()]), ([Listens()], []), ([], [])])
def test_a_checkpoint_goes_on_with_the_other_kind_of_step(tmp_path: Path, first: list[Any], then: list[Any]) -> None:
    whole, rest = tiny.module(dropout=0.2), tiny.module(dropout=0.2)
    tiny.fit(whole, tmp_path, [Listens()], max_steps=9)
    for stop in (2, 3, 4):  # in the middle, at the end and at the start of an epoch
        part = tiny.module(dropout=0.2)
        tiny.fit(part, tmp_path, [*first, tiny.checkpoints(tmp_path / str(stop))], max_steps=stop)
        trainer = tiny.fit(rest, tmp_path, then, checkpoint=tmp_path / str(stop) / "last.ckpt", max_steps=9)
        assert trainer.global_step == 9
        assert torch.equal(tiny.weights(whole), tiny.weights(rest))


def test_what_a_callback_logs_is_kept(tmp_path: Path) -> None:
    class Logs(pl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            module.log("at_start", float(batch_idx), batch_size=1)

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            module.log("at_end", outputs["loss"], on_step=True, on_epoch=True, batch_size=1)

    logged = []
    for more in ([], [Listens()]):
        trainer = tiny.fit(tiny.module(), tmp_path, [Logs(), *more], max_steps=7)
        logged.append({name: value.item() for name, value in trainer.callback_metrics.items()})
    assert logged[0] == logged[1]
    assert set(logged[0]) == {"at_start", "at_end", "at_end_step", "at_end_epoch"}


def scaled() -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=2.0**12))


class Double(tiny.TinyData):
    def fetch(self, indices: Any, rng: Any) -> Any:
        return {name: value.double() for name, value in super().fetch(indices, rng).items()}


class Subclass(tiny.StepModule):
    pass


LEFT_TO_LIGHTNING: dict[str, dict[str, Any]] = {
    "a gradient scaler": {"plugins": [scaled()]},
    "accumulation": {"accumulate_grad_batches": 2},
    "a profiler": {"profiler": "simple"},
    "double precision": {"precision": "64-true"},
    "a module with hooks of its own": {},
}


@pytest.mark.parametrize("what", LEFT_TO_LIGHTNING)
def test_what_a_direct_step_does_not_know_is_lightnings(tmp_path: Path, what: str) -> None:
    direct, module, data = Direct(), tiny.module(), tiny.TinyData()
    if what == "a module with hooks of its own":
        module.__class__ = Subclass
    if what == "double precision":
        data = Double()
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=2,
        callbacks=[direct],
        default_root_dir=tmp_path,
        **dict.fromkeys(quiet, False),
        **LEFT_TO_LIGHTNING[what],
    )
    lit.use_direct_steps(trainer)
    trainer.fit(module, tiny.loader(data=data))
    assert trainer.global_step == 2
    assert direct.was
    assert not any(direct.was)


def test_where_lightning_is_built_otherwise_its_own_steps_are_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    direct, expected, module = Direct(), tiny.module(), tiny.module()
    tiny.fit(expected, tmp_path, max_steps=4)
    monkeypatch.setattr(loop, "_INSIDES", attrgetter("moved_elsewhere"))
    tiny.fit(module, tmp_path, [direct], max_steps=4)
    assert not any(direct.was)
    assert torch.equal(tiny.weights(module), tiny.weights(expected))


def test_clipping_what_a_fused_optimizer_has_yet_to_unscale_is_refused(tmp_path: Path) -> None:
    module = tiny.module()
    module._make_optimizer = lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    trainer = pl.Trainer(
        accelerator="cpu",
        plugins=[scaled()],
        max_steps=1,
        gradient_clip_val=0.5,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        trainer.fit(module, tiny.loader())
