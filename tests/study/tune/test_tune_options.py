"""Names of options, when they are written, and the command that uses them."""

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
from wellfed.study.row import Row
from wellfed.study.tune.gain import TuneGain
from wellfed.study.tune.trial import Change, TuneTrial, with_overrides
from wellfed.study.tune.walk import Step
from wellfed.study.tune.written_options import MARK, TuneOptions, WrittenOptions, name_of

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
) -> WrittenOptions:
    composed = compose(start, "train", config_dir=configs)
    where = {"config_dir": configs, "extra_dirs": []}
    options = TuneOptions("mine", TuneConfig(**asked), composed, where, [f"--config-path={configs}"])
    options.check()
    record = record_of(with_overrides(start, turned), configs)
    return options.write(step(*turned), [step(*turned)], gain, record, "a heading")


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
def test_options_are_named_after_workload_and_card(workload: str, name: str, devices: int, expected: str) -> None:
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
        3,
    ),
)
def test_they_are_written_where_the_gain_is_sure_or_by_wish(
    configs: Path, gain: TuneGain | None, write: str, why_not: str | None
) -> None:
    found = written(configs, TURNED, gain=gain, write=TuneWrite[write])
    assert (found.why_not or "").startswith(why_not or "")
    assert (found.why_not is None) is (why_not is None)
    assert len(found.files) == (2 if why_not is None else 0)
    assert (configs / "loader" / "mine.yaml").exists() is (why_not is None)
    if why_not is not None:
        tuned, start = (f"--config-path={configs}", *TURNED), (f"--config-path={configs}",)
        assert (found.use, found.unproven) == ((tuned, ()) if gain is SURE else (start, tuned))


# -- what they hold, and the command ---------------------------------------------------------------------------------


def test_they_say_whose_they_are_and_why(configs: Path) -> None:
    written(configs, TURNED)
    text = (configs / "loader" / "mine.yaml").read_text()
    assert text.startswith(f"# {MARK}\n# a heading\n")
    assert "# turned by tune (1.5 times as good): 49 % waits\nbackend: inline\n" in text


@pytest.mark.parametrize(
    ("start", "turned", "beside"),
    [
        (("loader=baseline", "gpu=8gb", "seed=3", "sweep.trial_steps=40"), TURNED, ["gpu=8gb", "seed=3"]),
        slow(("loader.num_workers=3", "loader.skip_ids=[3,4]"), TURNED, ["loader.skip_ids=[3,4]"]),
        (("gpu=8gb", "gpu.tf32=false"), (*TURNED, "gpu.compile=default"), None),
        slow(("gpu=24gb",), (*TURNED, "gpu.compile=default"), ["gpu=24gb", "gpu.compile=default"]),
        (("gpu=cpu",), (*TURNED, "gpu.compile=default"), ["gpu=cpu", "gpu.compile=default"]),
        # These set knobs of the loader themselves, with options that others chose.
        (("experiment=forecast_starved",), (*TURNED, *NOTHING_AHEAD), None),
        slow(("experiment=hyperspectral_starved",), (*TURNED, *NOTHING_AHEAD), None),
    ],
)
def test_the_command_runs_what_was_measured(
    configs: Path, start: tuple[str, ...], turned: tuple[str, ...], beside: list[str] | None
) -> None:
    found = written(configs, turned, *start)
    flag, *words = found.use
    assert flag == f"--config-path={configs}"
    options = [f"{path.parent.name}=mine" for path in found.files]
    if beside is not None:
        assert words == [*beside, *options]
    again = compose(words, "train", config_dir=configs).resolved
    wanted = compose(with_overrides(start, turned), "train", config_dir=configs).resolved
    for group in ("gpu", "loader", "memory", "workload"):
        assert again[group] == wanted[group]
    assert shlex.split(train_command(found.use)) == ["python", "src/train.py", *found.use]
    assert not (configs / "gpu" / "mine.yaml").exists()


# -- files that are there --------------------------------------------------------------------------------------------


def test_what_is_somebodys_is_not_replaced_unless_asked(configs: Path) -> None:
    own = configs / "memory" / "mine.yaml"
    own.write_text("accumulate: 2\n")
    with pytest.raises(ConfigError, match=r"memory/mine.yaml: there already\. .* add --force"):
        written(configs, TURNED)
    assert own.read_text() == "accumulate: 2\n"
    assert written(configs, TURNED, write=TuneWrite.never).files == ()
    assert len(written(configs, TURNED, replace=True).files) == 2


@pytest.mark.parametrize("start", [("loader=mine",), slow(("memory=mine", "loader=baseline"))])
def test_options_that_the_start_itself_names_are_not_replaced(configs: Path, start: tuple[str, ...]) -> None:
    written(configs, TURNED)
    with pytest.raises(ConfigError, match=r"tune.name=mine: is what the start itself names.* Add tune.name=mine_2"):
        written(configs, TURNED, *start)
    assert written(configs, TURNED, *start, write=TuneWrite.never).files == ()


def test_where_they_can_not_be_written_the_command_has_the_overrides(
    configs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("wellfed.config.files.option_file.write_atomically", full)
    found = written(configs, TURNED)
    assert found.has_failed
    assert "mine.yaml can't be written: No space left on device" in str(found.why_not)
    assert found.use == (f"--config-path={configs}", *TURNED)
