from __future__ import annotations

import dataclasses

import pytest

from tests.planning.test_plan import MODEL, config, faults_of, planned
from wellfed.config.schema import Compile

GUEST = dataclasses.replace(MODEL, is_lightning_module=True)
BY_HAND = dataclasses.replace(GUEST, steps_by_hand=True)


@pytest.mark.parametrize(
    ("given", "model", "says"),
    [
        (config(memory={"micro_batch_steps": [8, 4]}), GUEST, "memory.micro_batch_steps: [8, 4] would split a step"),
        (config(gpu={"compile": Compile.default}), BY_HAND, "gpu.compile: default compiles training_step"),
        (config(trainer={"gradient_clip": 1.0}), BY_HAND, "trainer.gradient_clip: 1 clips before an optimizer step"),
    ],
)
def test_what_a_lightning_module_can_not_be_made_to_do_is_refused(given, model, says):
    fault = faults_of(given, model=model)
    assert says in fault
    assert "LightningModule" in fault
    assert "=null" in fault or "=none" in fault
    assert not isinstance(planned(given), list)  # of a plain module


def test_what_a_lightning_module_has_no_use_for_is_said():
    given = config(memory={"plateau_frac": 0.8})
    given.workload.optimizer = {"_target_": "torch.optim.SGD", "lr": 0.1}
    names = ("workload.optimizer", "memory.plateau_frac")
    for model, expected in ((GUEST, 2), (MODEL, 0)):
        said = [warning for warning in planned(given, model=model).warnings if warning.startswith(names)]
        assert len(said) == expected


def test_automatic_optimization_is_compiled_and_clipped():
    given = config(gpu={"compile": Compile.default}, trainer={"gradient_clip": 1.0})
    assert planned(given, model=GUEST)["gpu.compile"] == "default"
