import pytest
from omegaconf import OmegaConf

from wellfed.config.faults.check_composed import examine
from wellfed.config.schema import EvaluateConfig, RunConfig


@pytest.fixture
def job(make_config):
    config = OmegaConf.structured(make_config())
    OmegaConf.set_struct(config, True)
    return config


def test_a_sound_one_becomes_dataclasses(job):
    config, faults = examine(job)
    assert faults == []
    assert isinstance(config, RunConfig)
    assert config.workload.model["loss"] == 1.0


def test_it_is_left_as_it_is(job):
    job.seed = "${nope}"
    OmegaConf.update(job, "gpu.foo", 3, force_add=True)  # as +gpu.foo=3 does
    before = OmegaConf.to_yaml(job)
    assert len(examine(job)[1]) == 2
    assert OmegaConf.to_yaml(job) == before


def test_rules_are_checked_once_all_values_are_there(job):
    job.workload.name = "???"
    job.seed = "${nope}"
    job.trainer.devices = 0
    assert [fault.where for fault in examine(job)[1]] == ["seed=${nope}", "workload.name"]
    job.workload.name, job.seed = "x", 1
    assert [fault.where for fault in examine(job)[1]] == ["trainer.devices=0"]


def test_holes_inside_lists_and_free_nodes(job):
    job.workload.model = {"_target_": "wellfed.contract.LossOutput", "loss": ["${nope}", {"a": "???"}]}
    wheres = [fault.where for fault in examine(job)[1]]
    assert wheres == ["workload.model.loss[0]=${nope}", "workload.model.loss[1].a"]


def test_an_interpolation_of_the_wrong_type(job):
    job.seed = "${workload.name}"
    (fault,) = examine(job)[1]
    assert fault.where == "seed=${workload.name}"
    assert "could not be converted" in fault.problem


def test_strangers_anywhere_but_in_free_nodes(job):
    for dotted in ("foo", "workload.schedule.bar", "workload.data.val"):
        OmegaConf.update(job, dotted, 1, force_add=True)
    assert [fault.where for fault in examine(job)[1]] == ["workload.schedule.bar=1", "foo=1"]


def test_folders_of_ones_own_are_no_strangers_but_a_misspelt_one_is(job):
    job.workload.model = {"_target_": "wellfed.contract.LossOutput", "loss": "${paths.data_dir}"}
    (fault,) = examine(job)[1]
    assert fault.way_out == "Add it: +paths.data_dir=<folder>"
    OmegaConf.update(job, "paths.data_dir", "/data", force_add=True)
    config, faults = examine(job)
    assert (faults, config.workload.model["loss"]) == ([], "/data")
    OmegaConf.update(job, "paths.logdir", "/logs", force_add=True)
    (fault,) = examine(job)[1]
    assert (fault.where, fault.way_out) == ("paths.logdir=/logs", "Did you mean paths.log_dir?")


def test_no_schema():
    (fault,) = examine(OmegaConf.create({"seed": 3}))[1]
    assert "run_schema" in fault.way_out


def test_evaluation():
    assert examine(OmegaConf.structured(EvaluateConfig))[1] == []
    (fault,) = examine(OmegaConf.structured(EvaluateConfig(checkpoint=" ")))[1]
    assert (fault.where, fault.problem) == ("checkpoint=", "must not be empty.")
