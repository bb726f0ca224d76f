"""A training of a guest that is only timed: steps and callbacks of steps, no hooks of epochs and validations."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from tests.kit.guests import guest
from wellfed.process import StopRequest

pytestmark = pytest.mark.filterwarnings("ignore::Warning:lightning", "ignore::UserWarning")
HERE = "tests.train.guest.brought"
CALLED: list[str] = []


class Hears(pl.Callback):
    def on_train_batch_end(self, *_: Any) -> None:
        CALLED.append("step")

    def on_train_epoch_end(self, *_: Any) -> None:
        CALLED.append("epoch")

    def on_validation_end(self, *_: Any) -> None:
        CALLED.append("validation")


@pytest.mark.parametrize("data", [f"{HERE}.Data", f"{HERE}.Stream", f"{HERE}.datasets"])
def test_a_trial_makes_steps_alone_and_its_ceiling_changes_nothing(tmp_path: Path, data: str) -> None:
    CALLED.clear()
    own = (f"+callbacks.own._target_={__name__}.Hears", "telemetry.enabled=true", "telemetry.ceiling_steps=3")
    ran = guest(tmp_path, f"{HERE}.Module", data, *own, effective_batch_size=4)
    before = {name: value.clone() for name, value in ran.weights.items()}
    assert (ran.passes.ceiling.warm_up() or 0.0) > 0
    assert all(bool((value == before[name]).all()) for name, value in ran.weights.items())
    ran.passes.measure(9, StopRequest(), lambda: None)
    assert set(CALLED) == {"step"}
    assert ran.books.record.steps == len(CALLED) >= 12
    assert not ran.last.exists()
    assert (ran.passes.ceiling.warm_up() or 0.0) > 0
