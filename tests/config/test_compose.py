"""Composing the project's own configurations, and what a `Composed` says."""

import os
import pickle
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import yaml
from hydra.core.hydra_config import HydraConfig

from tests.kit.few import few
from wellfed import project
from wellfed.config.compose import Composed, compose, compose_as
from wellfed.config.rules import rule_faults
from wellfed.config.schema import Backend, EvaluateConfig, LoggerMode, RunConfig, Strategy
from wellfed.errors import ConfigError

CONFIGS = project.configs()


def options(group: str) -> list[str]:
    return sorted(file.stem for file in (CONFIGS / group).glob("*.yaml"))


@cache
def once(*overrides: str) -> Composed[RunConfig]:
    """Composed once for all tests, none of which changes it."""
    return compose(overrides)


def test_typed_all_through():
    composed = once()
    assert isinstance(composed.config, RunConfig)
    assert composed.config.loader.backend is Backend.auto
    assert composed.config.memory.features is None
    assert composed.config.logger.mode is LoggerMode.auto
    assert type(composed.config.workload.model) is dict
    assert composed.choices["gpu"] == "auto"
    assert "debug" not in composed.choices
    assert not [group for group in composed.choices if "hydra" in group]
    assert composed.run_dir is None


def test_nothing_is_resolved_while_composing():
    config = once("gpu=auto", "loader=auto", "memory=auto").config
    planned = [config.gpu.memory_gib, config.gpu.enforce, config.loader.num_workers, config.memory.micro_batch]
    assert planned == [None] * 4


def test_a_configuration_is_small_since_a_sweep_holds_thousands():
    assert len(pickle.dumps(once("gpu=auto", "loader=auto", "memory=auto"))) < 16 * 1024


def test_the_folder_of_the_run_is_filled_in(tmp_path):
    composed = compose(["+workload.data.kept=${hydra:runtime.output_dir}/a", "+workload.model.b=${paths.output_dir}"])
    filled = composed.in_folder(tmp_path)
    assert filled.config.workload.data["kept"] == f"{tmp_path}/a"
    assert filled.config.workload.model["b"] == filled.config.paths.output_dir == str(tmp_path)
    assert filled.resolved["workload"]["data"]["kept"] == f"{tmp_path}/a"
    assert "output_dir" not in filled.resolved["paths"]  # two runs would differ in it
    assert filled.config.loader.backend is Backend.auto


def test_the_folder_of_the_run_is_not_set_by_itself():
    with pytest.raises(ConfigError, match=r"hydra\.run\.dir=/x"):
        compose(["paths.output_dir=/x"])


def test_overrides_as_typed_and_in_order():
    typed = ["seed=3", "gpu=8gb", "hydra.run.dir=some/where", "seed=4"]
    composed = compose(typed)
    assert composed.overrides == ("seed=3", "gpu=8gb", "seed=4")
    assert composed.config.seed == 4
    assert composed.run_dir == Path("some/where")


def test_the_last_choice_of_a_group_holds():
    assert compose(["gpu=8gb", "gpu=16gb"]).choices["gpu"] == "16gb"


def test_run_dir_may_be_an_interpolation():
    composed = compose(["hydra.run.dir=${paths.log_dir}/${workload.name}/here"])
    assert composed.run_dir == Path("logs/recsys/here")


@pytest.mark.parametrize("value", few(["${.seed}", "${no_such}", "${no:such}", "${..dir}", "${.dir}"], 2))
def test_a_run_dir_that_can_t_be_resolved_is_told(value):
    with pytest.raises(ConfigError) as told:
        compose([f"hydra.run.dir={value}"])
    assert f"hydra.run.dir={value}: can't be resolved: " in str(told.value)


def test_hydra_values_can_be_used_and_leave_no_trace():
    before = HydraConfig.instance().cfg
    assert compose(["workload.name=${hydra:job.name}"]).config.workload.name == "train"
    assert HydraConfig.instance().cfg is before


def test_resolved_is_plain_and_hides_secrets(monkeypatch):
    monkeypatch.setenv("MY_SECRET", "from-the-environment")
    composed = compose(
        [
            "loader.backend=threads",
            "+workload.data.api_key=abc",
            "+workload.data.nested={hf_token: abc, password: abc, plain: abc, sort_keys: abc, token: 3}",
            "+workload.data.client_secret=${oc.env:MY_SECRET}",
            "+workload.model.max_tokens_name=abc",
            "workload.data._target_=my_free_form.f",
            "workload.model._target_=my_free_form.f",
        ],
        extra_dirs=[],
    )
    assert composed.resolved["loader"]["backend"] == "threads"
    data = composed.resolved["workload"]["data"]
    assert data["api_key"] == "***"
    assert data["client_secret"] == "***"
    assert data["nested"] == {"hf_token": "***", "password": "***", "plain": "abc", "sort_keys": "abc", "token": "***"}
    assert composed.resolved["workload"]["model"]["max_tokens_name"] == "abc"
    assert composed.config.workload.data["api_key"] == "abc"
    yaml.safe_dump(composed.resolved)


@pytest.fixture(autouse=True)
def free_form(tmp_path, monkeypatch):
    (tmp_path / "my_free_form.py").write_text("def f(**anything): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))


def test_hydra_files_are_hydras(tmp_path):
    composed = compose(["seed=7", "gpu=8gb", "paths.cache_dir=${paths.log_dir}/c"])
    composed.write_hydra_files(tmp_path)
    assert sorted(file.name for file in (tmp_path / ".hydra").iterdir()) == [
        "config.yaml",
        "hydra.yaml",
        "overrides.yaml",
    ]
    config, hydra, overrides = (
        yaml.safe_load((tmp_path / ".hydra" / f"{name}.yaml").read_text()) for name in ("config", "hydra", "overrides")
    )
    assert config["seed"] == 7
    assert config["paths"]["cache_dir"] == "${paths.log_dir}/c"
    assert config["gpu"]["precision"] == "auto"
    assert hydra["hydra"]["runtime"]["choices"]["gpu"] == "8gb"
    assert overrides == ["seed=7", "gpu=8gb", "paths.cache_dir=${paths.log_dir}/c"]


@pytest.mark.parametrize(
    "secret",
    few(["abc", "'abc: # it is'", '"abc\'s"', f"'abc {'long ' * 40}'"], 2),
    ids=["word", "yaml", "quote", "folded"],
)
def test_hydra_files_hide_secrets_that_were_typed(secret, tmp_path):
    typed = [f"+workload.data.api_key={secret}", "+workload.data.hf_token=${oc.env:HF_TOKEN,none}"]
    free = ["workload.data._target_=my_free_form.f"]
    compose([*typed, *free]).write_hydra_files(tmp_path)
    data = yaml.safe_load((tmp_path / ".hydra" / "config.yaml").read_text())["workload"]["data"]
    assert (data["api_key"], data["hf_token"]) == ("***", "${oc.env:HF_TOKEN,none}")
    for path in (tmp_path / ".hydra").glob("*.yaml"):
        assert "abc" not in path.read_text()
        assert "***" in path.read_text()


def test_a_password_of_digits_is_one_and_a_number_of_tokens_is_none():
    free = ["workload.data._target_=my_free_form.f"]
    data = compose([*free, "+workload.data={password: 12, max_token: 12}"]).resolved["workload"]["data"]
    assert (data["password"], data["max_token"]) == ("***", 12)


def test_yaml_is_what_cfg_job_shows():
    composed = compose(["seed=7", "paths.cache_dir=${paths.log_dir}/c"])
    text = composed.yaml()
    assert yaml.safe_load(text)["gpu"]["memory_gib"] is None
    assert "${paths.log_dir}/c" in text
    assert "logs/c" in composed.yaml(resolve=True)


def test_survives_pickling():
    composed = once()
    assert pickle.loads(pickle.dumps(composed)) == composed


def test_evaluation_has_its_own_schema():
    composed = compose(["checkpoint=best.ckpt"], "evaluate")
    assert isinstance(composed.config, EvaluateConfig)
    assert composed.config.checkpoint == "best.ckpt"


def test_extra_folders_are_searched_after_ours(tmp_path):
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu" / "mine.yaml").write_text("memory_gib: 5.5\n")
    (tmp_path / "gpu" / "8gb.yaml").write_text("memory_gib: 1.0\n")
    assert compose(["gpu=mine"], extra_dirs=[tmp_path]).config.gpu.memory_gib == 5.5
    assert compose(["gpu=8gb"], extra_dirs=[tmp_path]).config.gpu.memory_gib == 7.2


def test_another_config_dir(tmp_path):
    (tmp_path / "train.yaml").write_text("defaults: [run_schema, _self_]\nseed: 9\nworkload: {name: x}\n")
    with pytest.raises(ConfigError) as raised:
        compose([], config_dir=tmp_path)
    assert {"workload.data", "workload.model"} == {fault.where for fault in raised.value.faults}


@pytest.mark.slow  # tests/plan/test_golden.py composes each
def test_every_gpu_loader_and_memory_go_together():
    """Each option sets its own group only, so all 216 follow from composing each option once."""
    base = once()
    parts = {
        group: {option: once(f"{group}={option}") for option in options(group)} for group in ("gpu", "loader", "memory")
    }
    for group, composed in parts.items():
        for option in composed.values():
            assert {**option.resolved, group: None} == {**base.resolved, group: None}
    combinations = list(product(*(parts[group] for group in parts)))
    assert len(combinations) == 6 * 6 * 6
    for combination in combinations:
        chosen = {
            group: getattr(parts[group][one].config, group) for group, one in zip(parts, combination, strict=True)
        }
        assert rule_faults(replace(base.config, **chosen)) == [], combination


@pytest.mark.slow  # tests/config/files/test_knobs_page.py
def test_every_other_option_composes(all_installed):
    """As many of them together as there are groups. Experiments: tests/every/test_workloads.py."""
    found = {group: options(group) for group in ("workload", "trainer", "callbacks", "telemetry", "logger", "paths")}
    for number in range(max(map(len, found.values()))):
        chosen = {group: names[number % len(names)] for group, names in found.items()}
        composed = once(*(f"{group}={option}" for group, option in chosen.items()))
        assert composed.choices.items() >= chosen.items()
    for option in options("debug"):  # sets knobs of the others
        assert once(f"debug={option}").choices["debug"] == option


def test_gpu_options_hold_nine_tenths_of_the_card():
    budgets = {gpu: once(f"gpu={gpu}").config.gpu.memory_gib for gpu in options("gpu")}
    nominal = {"8gb": 8, "16gb": 16, "24gb": 24, "80gb": 80}
    assert budgets == {"auto": None, "cpu": None} | {
        gpu: pytest.approx(0.9 * size, abs=1e-9) for gpu, size in nominal.items()
    }


@pytest.mark.slow
def test_trainer_telemetry_and_logger_options():
    trainers = {name: once(f"trainer={name}").config.trainer for name in options("trainer")}
    assert all(trainer.max_steps is None and trainer.max_epochs for trainer in trainers.values())
    assert (trainers["ddp"].strategy, trainers["fsdp"].strategy) == (Strategy.ddp, Strategy.fsdp)
    assert once("telemetry=dense").config.telemetry.interval_s == 0.1
    assert not once("telemetry=none").config.telemetry.enabled
    assert once("logger=none").config.logger.mode is LoggerMode.disabled


def test_each_logger_is_turned_on_by_its_option_and_several_by_a_list(all_installed):
    def on(*overrides):
        logger = compose(overrides).config.logger
        return [*(["wandb"] if logger.mode is LoggerMode.auto else []), *(n for n in others if getattr(logger, n))]

    others = ("tensorboard", "mlflow", "csv")
    assert on() == on("logger=wandb") == ["wandb"]
    assert on("logger=csv") == ["csv"]
    assert on("logger=[csv,wandb]") == ["wandb", "csv"]
    assert compose(["logger=[csv,wandb]"]).choices["logger"] == "[csv,wandb]"


def test_an_option_of_a_list_that_is_none_is_told():
    with pytest.raises(ConfigError, match=r"logger=\[csv,tensorbord\]: there is no option tensorbord") as caught:
        compose(["logger=[csv,tensorbord]"])
    assert "Did you mean logger=tensorboard?" in str(caught.value)


@pytest.mark.parametrize("group", ["gpu", "loader", "memory"])
def test_speed_options_never_set_what_is_learned(group):
    for file in (CONFIGS / group).glob("*.yaml"):
        assert "_global_" not in file.read_text()
        assert "workload" not in file.read_text()


def test_no_option_is_named_like_a_yaml_value():
    files = list(CONFIGS.rglob("*.yaml"))
    assert len(files) > 30
    for file in files:
        assert isinstance(yaml.safe_load(file.stem), str), file


@pytest.mark.slow
def test_modes_of_compile_are_those_of_torch() -> None:
    assert compose(["gpu.compile=max-autotune"]).resolved["gpu"]["compile"] == "max-autotune"
    with pytest.raises(ConfigError, match="must be one of none, default, reduce-overhead, max-autotune. Did you mean"):
        compose(["gpu.compile=reduce"])


def test_a_scheduler_of_torch_stays_where_the_run_gets_its_folder(tmp_path):
    target = {"_target_": "torch.optim.lr_scheduler.StepLR", "step_size": 3}
    typed = [f"+workload.schedule.{key}={value}" for key, value in target.items()]
    composed = compose(["workload.schedule.name=constant", *typed])
    assert composed.config.workload.schedule.target == target
    assert composed.in_folder(tmp_path).config.workload.schedule.target == target


def test_a_job_has_what_hydra_sets_and_leaves_no_trace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own = ["hydra.job.chdir=true", "+hydra.job.env_set.PLANTED=x"]
    composed = compose([*own, "workload.data.path=here", "+workload.data.out=${hydra:runtime.output_dir}"])
    before = HydraConfig.instance().cfg
    with composed.in_folder(tmp_path / "run").as_job():
        job = HydraConfig.get()
        assert (job.job.name, job.runtime.cwd, job.mode.name) == ("train", str(tmp_path), "RUN")
        assert job.runtime.output_dir == os.getcwd() == str(tmp_path / "run")
        assert os.environ["PLANTED"] == "x"
    assert (HydraConfig.instance().cfg, os.getcwd()) == (before, str(tmp_path))
    assert "PLANTED" not in os.environ
    assert composed.config.paths.log_dir == str(tmp_path / "logs")
    assert composed.config.workload.data["path"] == "here"  # there is no such file
    assert composed.is_tied_to_folder
    (tmp_path / "here").touch()
    assert compose([own[0], "workload.data.path=here"]).config.workload.data["path"] == str(tmp_path / "here")


def test_reading_the_folder_of_a_job_is_noticed():
    seen = []
    with compose().without_folder(lambda: seen.append(True)):
        assert HydraConfig.get().job.name == "train"
        assert not seen
        assert Path(HydraConfig.get().runtime.output_dir).is_dir()
    assert seen


@pytest.mark.slow  # tests/end_to_end/test_hydra.py
def test_flags_read_the_same_files_again_from_another_folder(tmp_path, monkeypatch):
    for name in ("more/gpu", "searched/memory"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "more/gpu/mine.yaml").write_text("memory_gib: 3\n")
    (tmp_path / "searched/memory/mine.yaml").write_text("micro_batch: 7\n")
    monkeypatch.chdir(tmp_path)
    typed = ["hydra.searchpath=[file://searched]", "+hydra.job.env_set.A=b"]
    composed = compose([*typed, "gpu=mine", "memory=mine"], extra_dirs=["more"])
    monkeypatch.chdir("/")
    assert compose_as(composed.flags, composed.overrides).resolved == composed.resolved
    assert compose_as(composed.flags, composed.overrides).flags == composed.flags
    assert compose().flags == []
