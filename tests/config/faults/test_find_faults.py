"""Every fault of an unusable configuration, in one message; what the user types and what is told."""

import pytest

from tests.kit.few import few
from wellfed.config.compose import compose
from wellfed.errors import ConfigError, Fault


def faults_of(*overrides: str, config_name: str = "train", **places) -> tuple[Fault, ...]:
    with pytest.raises(ConfigError) as raised:
        compose(overrides, config_name, **places)
    return raised.value.faults


GPUS = "gpu has 8gb, 16gb, 24gb, 80gb, auto, cpu."

# (override, problem, way out); where is the override as typed
ONE_EACH = [
    ("gpu=42gb", "there is no option 42gb.", f"{GPUS} Did you mean gpu=24gb?"),
    ("gpu=24", "there is no option 24.", f"{GPUS} Did you mean gpu=24gb?"),
    ("gpu=", "no option is named.", GPUS),
    ("gpu=[8gb,43gb]", "there is no option 43gb.", GPUS),
    ("gpu=8gb,16gb", "names several values, and this is one run.", "Add -m to run them all, or write gpu=[8gb,16gb]"),
    ("hydra/launcher=nope", "there is no option nope.", "hydra/launcher has basic"),
    ("lodaer=aggressive", "no such knob.", "Did you mean loader=aggressive?"),
    ("lodaer.num_workers=2", "no such knob.", "Did you mean loader.num_workers=2?"),
    ("loader.num_worker=3", "no such knob.", "Did you mean loader.num_workers=3?"),
    ("loader.zzz=3", "no such knob.", "loader has backend, num_workers, prefetch_factor"),
    ("micro_batch=3", "no such knob.", "Did you mean memory.micro_batch=3?"),
    ("zzz=3", "no such knob.", "There are seed, resume, rerun, gpu, loader"),
    (
        "workload.effective_batch_size=abc",
        "must be a whole number >= 1 or null.",
        "Samples per optimizer step over all ranks; kept",
    ),
    ("seed=1.5", "must be a whole number >= 0 and < 2**63.", "seed: Seed of everything random."),
    ("seed=null", "must be a whole number >= 0 and < 2**63.", "seed: "),
    ("gpu.memory_gib=lots", "must be a number > 0 or null.", "GPU memory budget in GiB."),
    ("gpu.tf32=maybe", "must be true or false.", "Let float32 matrix products"),
    ("gpu.precision=fp8", "must be one of auto, 32-true, bf16-mixed, 16-mixed, bf16-true.", ""),
    ("gpu.precision=bf16-mixd", "must be one of auto", "Did you mean gpu.precision=bf16-mixed?"),
    ("loader.skip_ids=3", "must be a list [..] of whole numbers >= 0.", "loader.skip_ids: Indices"),
    ("=3", "has no name before '='.", "Write knob=value or group=option, e.g. gpu=24gb."),
    ("foo", "is not an override: it has no '='.", "Write knob=value or group=option, e.g. gpu=24gb."),
    ("gpu=[", "can't be read: ", "Close each bracket, or quote a text that holds signs: 'gpu=\"[\"'"),
    ("workload.name=a)", "can't be read: ", "signs: 'workload.name=\"a)\"'"),
    ("resume=a=b", "can't be read: ", "signs: 'resume=\"a=b\"'"),
    ("a b c=3", "can't be read", "Names are words joined by dots"),
    ("~loader.zzz", "Could not delete from config. 'loader.zzz' does not exist.", "Set another value instead."),
    ("experiment=nope", "there is no option nope.", "experiment has forecast_8gb, forecast_16gb"),
    ("workload.model.dropout_rate=3", "does not list it so far.", "Did you mean workload.model.dropout=3? Add it: +"),
]


BY_THEMSELVES = {"gpu=24", "workload.model.dropout_rate=3"}
"""Faults that are also given without others in make test."""


@pytest.mark.parametrize(
    ("override", "problem", "way_out"),
    [pytest.param(*case, id=case[0], marks=[] if case[0] in BY_THEMSELVES else pytest.mark.slow) for case in ONE_EACH],
)
def test_one_fault(override, problem, way_out):
    (fault,) = faults_of(override)
    assert fault.where == override
    assert problem in fault.problem
    assert way_out in fault.way_out


# (override, where, problem, way out): the faults that only the composed configuration shows
COMPOSED = [
    ("+gpu.foo=1", "gpu.foo=1", "no such knob.", "gpu has memory_gib"),
    ("+foo=1", "foo=1", "no such knob.", "There are seed"),
    ("seed=${nope}", "seed=${nope}", "can't be resolved: Interpolation key 'nope' not found.", "Name a knob"),
    ("seed=${seed}", "seed=${seed}", "can't be resolved: Recursive interpolation detected.", "Name a knob"),
    ("workload.model.dim=${nope}", "workload.model.dim=${nope}", "can't be resolved", "Name a knob"),
    ("workload.name=???", "workload.name", "has no value (???)", "Set workload.name=<value>: Name of the workload"),
    ("workload.effective_batch_size=-5", "workload.effective_batch_size=-5", "must be >= 1.", "_size=1."),
    ("trainer.devices=0", "trainer.devices=0", "must be >= 1.", "Set trainer.devices=1."),
    ("workload.model._target_=torhc.f", "workload.model._target_=torhc.f", "no package torhc", "package torch?"),
]


@pytest.mark.parametrize(
    ("override", "where", "problem", "way_out"), few(COMPOSED, 2), ids=[case[0] for case in COMPOSED]
)
def test_one_fault_of_the_composed(override, where, problem, way_out):
    fault = faults_of(override)[0]
    assert fault.where == where
    assert problem in fault.problem
    assert way_out in fault.way_out


def test_all_of_the_command_line_in_one_message_in_the_order_typed():
    typed = {override: rest for override, *rest in ONE_EACH}
    found = faults_of(*typed)
    assert [fault.where for fault in found] == [*typed]
    for fault in found:
        problem, way_out = typed[fault.where]
        assert problem in fault.problem
        assert way_out in fault.way_out


def test_the_message_counts_and_lists():
    with pytest.raises(ConfigError) as raised:
        compose(["gpu=42gb", "loader.num_worker=3"])
    lines = str(raised.value).splitlines()
    assert lines[0] == "2 faults in the configuration; nothing was run."
    assert [line.split(":")[0] for line in lines[1:]] == ["  - gpu=42gb", "  - loader.num_worker=3"]


def test_what_is_taken_away_is_the_schemas_default():
    assert compose(["~seed", "~gpu"]).config.seed == 1


def test_rules_are_judged_once_nothing_else_is_wrong():
    typed = ("loader.num_workers=0", "loader.prefetch_factor=4", "seed=-1")
    assert [fault.where for fault in faults_of("gpu=42gb", *typed)] == ["gpu=42gb"]
    assert [fault.where for fault in faults_of(*typed)] == ["seed=-1", "loader.prefetch_factor=4"]


def test_an_argument_that_the_yaml_does_not_list_needs_a_plus(tmp_path, monkeypatch):
    (tmp_path / "my_model.py").write_text("def f(dim=1, depth=2): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "workload").mkdir()
    text = "{name: x, effective_batch_size: 1, model: {_target_: my_model.f, dim: 1}, data: {_target_: my_model.f}}"
    (tmp_path / "workload" / "mine.yaml").write_text(text)
    places = {"extra_dirs": [tmp_path]}
    base = ["workload=mine"]
    (fault,) = faults_of(*base, "workload.model.depth=3", **places)
    assert fault.where == "workload.model.depth=3"
    assert fault.way_out == "Add it: +workload.model.depth=3"
    assert compose([*base, "+workload.model.depth=3"], **places).config.workload.model["depth"] == 3
    (fault,) = faults_of(*base, "workload.model.dmi=3", **places)
    assert fault.way_out == "Did you mean workload.model.dim=3? Add it: +workload.model.dmi=3"


def test_evaluation_is_judged_by_its_own_schema():
    found = faults_of("paths=q", "seed=1", config_name="evaluate")
    assert [fault.where for fault in found] == ["paths=q", "seed=1"]
    assert faults_of("gpu=8gb", config_name="evaluate")[0].where == "gpu=8gb"
    assert found[1].way_out == "There are checkpoint, accelerator, paths."
    assert faults_of("checkpoint=", config_name="evaluate")[0].problem == "must not be empty."


def test_no_such_primary_config():
    (fault,) = faults_of(config_name="tarin")
    assert fault.where == "--config-name tarin"
    assert "train" in fault.way_out
    assert "_schema" not in fault.way_out


def test_a_primary_config_without_schema(tmp_path):
    (tmp_path / "train.yaml").write_text("seed: 3\n")
    (fault,) = faults_of(config_dir=tmp_path)
    assert "run_schema" in fault.way_out


def test_folders_that_are_not_there(tmp_path):
    assert faults_of(config_dir=tmp_path / "no")[0].where == str(tmp_path / "no")
    assert faults_of(extra_dirs=[tmp_path / "no"])[0].where == f"--config-dir {tmp_path / 'no'}"


def test_a_group_without_files():
    (fault,) = faults_of("sweep=quick_as_can_be")
    assert fault.where == "sweep=quick_as_can_be"


def test_faults_of_hydras_own_knobs():
    found = faults_of("hydra.foo=3", "hydra.job.nmae=x", "loader.num_worker=3")
    assert [fault.where for fault in found] == ["hydra.foo=3", "hydra.job.nmae=x", "loader.num_worker=3"]


@pytest.mark.slow
def test_folders_of_hydra_searchpath_count(tmp_path):
    (tmp_path / "loader").mkdir()
    (tmp_path / "loader" / "mine.yaml").write_text("num_workers: 3\n")
    (tmp_path / "extra").mkdir()
    (tmp_path / "extra" / "more.yaml").write_text("# @package _global_\ntrainer:\n  max_step: 3\n")
    given = [f"hydra.searchpath=[file://{tmp_path}]", "loader=mine"]
    assert compose(given, "train").config.loader.num_workers == 3
    (fault,) = faults_of(*given, "trainer.max_step=3")
    assert str(fault) == "trainer.max_step=3: no such knob. Did you mean trainer.max_steps=3?"
    (fault,) = faults_of(*given, "+extra=more")
    assert fault.where == "extra/more.yaml: trainer.max_step"
    (fault,) = faults_of(given[0], "loader=mein")
    assert "Did you mean loader=mine?" in fault.way_out


def test_a_searchpath_that_is_none_is_told():
    (fault,) = faults_of("hydra.searchpath=3", "trainer.max_steps=3")
    assert "hydra.searchpath" in str(fault)
