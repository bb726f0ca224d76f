"""Where a run, a plan, a fit and an evaluation begin."""

import dataclasses

import pytest

from tests.planning.machines import LAPTOP
from wellfed.config.compose import compose
from wellfed.config.schema import Accelerator
from wellfed.errors import ConfigError
from wellfed.run import assemble
from wellfed.run.planner import Planner


def test_what_the_machine_and_the_imports_refuse_is_told_at_once_before_data_is_read(monkeypatch):
    monkeypatch.setattr(assemble, "make_parts", lambda config: pytest.fail("the data was read"))
    made = compose(["logger=none"])
    trainer = dataclasses.replace(made.config.trainer, accelerator=Accelerator.gpu)
    model = {**made.config.workload.model, "_target_": "workloads.recsys.model.NoSuchModel"}
    workload = dataclasses.replace(made.config.workload, model=model)
    config = dataclasses.replace(made.config, trainer=trainer, workload=workload)
    with pytest.raises(ConfigError) as raised:
        Planner.start(dataclasses.replace(made, config=config), LAPTOP)
    where = [fault.where for fault in raised.value.faults]
    assert where[0] == "trainer.accelerator"
    assert len(where) == 2
    assert "NoSuchModel" in str(raised.value)
