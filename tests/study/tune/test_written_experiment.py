"""Names of a tune's experiment, when it is written, and the command that uses it."""

import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.kit.few import few, slow
from tests.kit.machines import card, machine
from wellfed import project
from wellfed.config.compose import compose
from wellfed.config.files.option_file import check_name
from wellfed.config.schema import RunConfig, TrainerConfig, TuneConfig, TuneWrite, WorkloadConfig
from wellfed.errors import ConfigError
from wellfed.record.entries import RunRecord
from wellfed.study.board.step_table import train_command
from wellfed.study.rows import Row
from wellfed.study.tune.trial import Change, TuneTrial, with_overrides
from wellfed.study.tune.walk import Step
from wellfed.study.tune.written_experiment import MARK, Recommendation, TuneExperiment, name_of, planned_values
from wellfed.study.tune_gain import TuneGain

SURE, DOUBTFUL = TuneGain(1.5, (1.4, 1.6), 5), TuneGain(1.5, (0.9, 2.1), 5)
TURNED = ("loader.backend=inline", "loader.num_workers=0")
NOTHING_AHEAD = ("loader.prefetch_factor=null", "loader.persistent_workers=null")


def step(*turned: str) -> Step:
    row = Row("p", "trial", (), "ok", 1, samples_per_s=2.0)
    return Step(Change(turned, "49 % waits", turned), [TuneTrial(row, RunRecord("p"))], None, True, "1.5 times as good")


@pytest.fixture
def configs(tmp_path: Path) -> Path:
    """A copy of the project's, which alone is written to."""
    return Path(shutil.copytree(project.configs(), tmp_path / "configs"))


def record_of(words: tuple[str, ...], configs: Path) -> RunRecord:
    """As a run of these words would leave it, whose plan decided nothing beyond them."""
    composed = compose(words, "train", config_dir=configs)
    plan: dict[str, Any] = {
        f"loader.{knob}": {"value": value, "because": f"loader.{knob} was set", "source": "set"}
        for knob, value in composed.resolved["loader"].items()
        if knob in ("backend", "num_workers")
    }
    return replace(RunRecord.start("x"), config=composed.resolved, plan=plan)


def written(
    configs: Path, turned: tuple[str, ...], *start: str, gain: TuneGain | None = SURE, **asked: Any
) -> Recommendation:
    composed = compose(start, "train", config_dir=configs)
    experiment = TuneExperiment("mine", TuneConfig(**asked), composed, [f"--config-path={configs}"])
    experiment.check()
    record = record_of(with_overrides(start, turned), configs)
    return experiment.write(step(*turned), [step(*turned)], gain, record, "a heading")


# -- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workload", "name", "devices", "expected"),
    [
        ("recsys", "NVIDIA GeForce RTX 4090", 1, "recsys_rtx_4090"),
        ("recsys", "NVIDIA A100-SXM4-80GB", 4, "recsys_4x_a100_sxm4_80gb"),
        ("recsys", "Tesla T4", 1, "recsys_tesla_t4"),
        ("日本", "NVIDIA GeForce 3090", 1, "tune_3090"),
        ("2d-net", "AMD Radeon", 1, "tune_2d_net"),
    ],
)
def test_it_is_named_after_workload_and_card(workload: str, name: str, devices: int, expected: str) -> None:
    config = RunConfig(workload=WorkloadConfig(name=workload), trainer=TrainerConfig(devices=devices))
    found = name_of(config, machine(replace(card(24), name=name)), on_gpu=True)
    assert found == expected
    check_name(found, "tune.name=")


# -- when they are written -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gain", "write", "why_not"),
    few(
        [
            (SURE, "auto", None),
            (DOUBTFUL, "auto", "the gain is within noise"),
            (DOUBTFUL, "always", None),
            (None, "auto", "nothing is better than the start"),
            (SURE, "never", "tune.write=never"),
        ],
        2,
    ),
)
def test_it_is_written_where_the_gain_is_sure_or_by_wish(
    configs: Path, gain: TuneGain | None, write: str, why_not: str | None
) -> None:
    found = written(configs, TURNED, gain=gain, write=TuneWrite[write])
    assert (found.why_not or "").startswith(why_not or "")
    assert (found.why_not is None) is (why_not is None)
    assert (configs / "experiment" / "mine.yaml").exists() is (found.file is not None) is (why_not is None)
    if why_not is not None:
        tuned, start = (f"--config-path={configs}", *TURNED), (f"--config-path={configs}",)
        assert (found.use, found.unproven) == ((tuned, ()) if gain is SURE else (start, tuned))


# -- what it holds, and the command -----------------------------------------------------------------------------------


def test_it_says_whose_it_is_and_why(configs: Path) -> None:
    written(configs, TURNED)
    text = (configs / "experiment" / "mine.yaml").read_text()
    assert text.startswith(f"# @package _global_\n# {MARK}\n# a heading\n")
    assert "# turned by tune (1.5 times as good): 49 % waits\n  backend: inline\n" in text


@pytest.mark.parametrize(
    ("start", "turned", "beside"),
    [
        (("loader=baseline", "gpu=8gb", "seed=3", "sweep.trial_steps=40"), TURNED, ["seed=3"]),
        slow(("loader.num_workers=3", "loader.skip_ids=[3,4]"), TURNED, []),
        slow(("gpu=8gb", "gpu.tf32=false"), (*TURNED, "gpu.compile=default"), []),
        # This sets knobs of the loader itself, with options that others chose.
        slow(("experiment=forecast_starved",), (*TURNED, *NOTHING_AHEAD), []),
        slow(("experiment=hyperspectral_starved",), (*TURNED, *NOTHING_AHEAD), []),
    ],
)
def test_the_command_runs_what_was_measured(
    configs: Path, start: tuple[str, ...], turned: tuple[str, ...], beside: list[str]
) -> None:
    found = written(configs, turned, *start)
    flag, *words = found.use
    assert flag == f"--config-path={configs}"
    assert words == [*beside, "experiment=mine"]
    again = compose(words, "train", config_dir=configs).resolved
    wanted = compose(with_overrides(start, turned), "train", config_dir=configs).resolved
    for group in ("gpu", "loader", "memory", "workload", "seed"):
        assert again[group] == wanted[group]
    assert shlex.split(train_command(found.use)) == ["python", "src/train.py", *found.use]


# -- files that are there --------------------------------------------------------------------------------------------


@pytest.mark.slow  # tests/config/files/test_experiment_file.py
def test_what_is_somebodys_is_not_replaced_unless_asked(configs: Path) -> None:
    own = configs / "experiment" / "mine.yaml"
    own.write_text("memory: {accumulate: 2}\n")
    with pytest.raises(ConfigError, match=r"experiment/mine.yaml: there already\. .* add --force"):
        written(configs, TURNED)
    assert own.read_text() == "memory: {accumulate: 2}\n"
    assert written(configs, TURNED, write=TuneWrite.never).file is None
    assert written(configs, TURNED, replace=True).file == own
    assert written(configs, TURNED).file == own  # tune's own now


@pytest.mark.slow
def test_a_file_made_during_the_tune_is_not_replaced(configs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = configs / "experiment" / "mine.yaml"
    real, checks = TuneExperiment.check, list[Path]()

    def check(experiment: TuneExperiment) -> Path:
        checks.append(real(experiment))
        own.write_text("memory: {accumulate: 2}\n")
        return checks[-1]

    monkeypatch.setattr(TuneExperiment, "check", check)
    found = written(configs, TURNED)
    assert found.has_failed
    assert "--force" in str(found.why_not)
    assert own.read_text() == "memory: {accumulate: 2}\n"


@pytest.mark.slow
def test_an_experiment_that_the_start_itself_names_is_not_replaced(configs: Path) -> None:
    written(configs, TURNED)
    with pytest.raises(ConfigError, match=r"tune.name=mine: is what the start itself names.* Add tune.name=mine_2"):
        written(configs, TURNED, "experiment=mine")


@pytest.mark.slow  # tests/config/files/test_experiment_file.py
def test_where_it_can_not_be_written_the_command_has_the_overrides(
    configs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("wellfed.config.files.option_file.write_atomically", full)
    found = written(configs, TURNED)
    assert found.has_failed
    assert "mine.yaml can't be written: No space left on device" in str(found.why_not)
    assert found.use == (f"--config-path={configs}", *TURNED)


def test_settings_that_only_a_plan_has_are_left_to_the_next_plan() -> None:
    """A DataLoader as it came has its own numbers of workers."""
    planned = {"loader.backend": "own", "loader.num_workers": 3, "memory.micro_batch": 64, "memory.accumulate": 4}
    plan: Any = {knob: {"value": value, "because": "", "source": "set"} for knob, value in planned.items()}
    found = planned_values(RunRecord("x", plan=plan))
    assert {knob: value.value for knob, value in found.items()} == {
        "loader.backend": "own", "memory.micro_batch": 64, "memory.accumulate": None,
    }  # fmt: skip
