import pytest
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode

from wellfed import project
from wellfed.config.compose import compose
from wellfed.config.hydra_session import COMPOSE_ERRORS, open_hydra, register_schemas
from wellfed.config.schema import TuneConfig, TuneRunConfig
from wellfed.errors import ConfigError


def test_the_projects_configs():
    assert (project.configs() / "train.yaml").is_file()
    assert project.configs().is_absolute()


def test_schemas_are_registered_once():
    register_schemas()
    stored = ConfigStore.instance().repo["run_schema.yaml"]
    register_schemas()
    assert ConfigStore.instance().repo["run_schema.yaml"] is stored
    assert "evaluate_schema.yaml" in ConfigStore.instance().repo


def test_an_extension_has_all_of_what_it_extends_and_changes_none_of_it():
    words = ["gpu=24gb", "experiment=forecast_starved", "seed=3"]
    run, tune = compose(words), compose([*words, "tune.rounds=7"], "tune")
    assert isinstance(tune.config, TuneRunConfig)
    assert tune.config.tune == TuneConfig(rounds=7)
    assert {key: value for key, value in tune.resolved.items() if key != "tune"} == run.resolved
    assert tune.choices == run.choices


def test_faults_of_an_extension_are_those_of_both():
    with pytest.raises(ConfigError) as refused:
        compose(["gpu=42gb", "tune.round=3", "seed=x", "tune.rounds=1"], "tune")
    told = [str(fault) for fault in refused.value.faults]
    assert told[0].startswith("gpu=42gb: there is no option 42gb. gpu has ")
    assert told[1] == "tune.round=3: no such knob. Did you mean tune.rounds=3?"
    assert told[2].startswith("seed=x: must be a whole number")


def test_it_opens_beside_others_and_leaves_no_trace():
    first, second = open_hydra(), open_hydra(job_name="evaluate")
    assert first.config_loader is not second.config_loader
    assert not GlobalHydra.instance().is_initialized()


def test_where_it_searches(tmp_path):
    sources = open_hydra(extra_dirs=[tmp_path]).config_loader.get_sources()
    assert [source.provider for source in sources] == ["hydra", "main", "command-line", "schema"]
    assert sources[2].path == str(tmp_path)


def test_folders_must_be_there(tmp_path):
    with pytest.raises(ConfigError, match="is no folder of configurations"):
        open_hydra(tmp_path / "no")
    with pytest.raises(ConfigError, match="is no folder"):
        open_hydra(extra_dirs=[tmp_path / "no"])


@pytest.mark.parametrize(
    "overrides", [["gpu=24"], ["gpu=42gb"], ["seed=x"], ["foo"], ["a=["], ["loader.x=1"], ["gpu=8gb,16gb"], ["=="]]
)
def test_what_hydra_raises_is_listed(overrides):
    with pytest.raises(COMPOSE_ERRORS):
        open_hydra().compose_config("train", overrides, RunMode.RUN)
