"""Where a run, a plan, a fit and an evaluation begin."""

import dataclasses

import pytest

from tests.kit.machines import LAPTOP
from wellfed.config.compose import compose
from wellfed.config.schema import Accelerator
from wellfed.errors import ConfigError
from wellfed.run.objects import assemble
from wellfed.run.planner import Planner


def test_what_the_machine_and_the_imports_refuse_is_told_at_once_before_data_is_read(monkeypatch, tmp_path):
    (tmp_path / "my_importing.py").write_text("import no_such_package_at_all\n\nf = no_such_package_at_all.f\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(assemble, "make_objects", lambda config: pytest.fail("the data was read"))
    made = compose(["logger=none"])
    trainer = dataclasses.replace(made.config.trainer, accelerator=Accelerator.gpu)
    workload = dataclasses.replace(made.config.workload, data={"_target_": "my_importing.f"})
    config = dataclasses.replace(made.config, trainer=trainer, workload=workload)
    with pytest.raises(ConfigError) as raised:
        Planner.start(dataclasses.replace(made, config=config), LAPTOP)
    machine, imported = raised.value.faults
    assert machine.where == "trainer.accelerator"
    assert imported.problem == "needs the package no_such_package_at_all, which is not installed."
