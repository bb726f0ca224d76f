import shutil
from pathlib import Path

import pytest

from wellfed.config.compose import compose
from wellfed.config.files.experiment_file import write_experiment
from wellfed.config.files.option_file import Value
from wellfed.errors import ConfigError

CONFIGS = Path(__file__).parents[3] / "configs"


@pytest.fixture
def configs(tmp_path):
    shutil.copytree(CONFIGS, tmp_path / "configs")
    return tmp_path / "configs"


def written(configs, overrides, planned, **more):
    composed = compose(overrides, config_dir=configs)
    return composed, write_experiment("mine", composed, planned, heading="why\nand how", **more)


def test_what_was_given_and_what_was_planned_compose_again(configs):
    given = ["experiment=recsys_8gb", "loader=aggressive", "workload.model.dim=32", "workload.data.scale=0.5", "seed=7"]
    planned = {
        "memory.micro_batch": Value(512, "the most that fit: 6.5 GiB"),
        "loader.skip_ids": Value([3, 5], "asked for"),
        "gpu.precision": Value("bf16-mixed", "two\nlines"),
        "loader.pin_memory": Value(True, "on a GPU"),
        "memory.accumulate": Value(None, "nothing"),
    }
    before, path = written(configs, given, planned)
    after = compose(["experiment=mine"], config_dir=configs)
    for dotted, entry in planned.items():
        group, _, name = dotted.partition(".")
        assert after.resolved[group][name] == entry.value
    assert after.resolved["workload"] == before.resolved["workload"]
    assert (after.choices["gpu"], after.choices["loader"], after.choices["memory"]) == ("8gb", "aggressive", "cache")
    assert after.resolved["seed"] == 1, "one run's matter"
    text = path.read_text()
    assert "# the most that fit: 6.5 GiB\n  micro_batch: 512\n" in text
    assert "# two lines\n" in text
    assert text.startswith("# @package _global_\n# why\n# and how\ndefaults:\n")


@pytest.mark.slow
def test_a_later_override_still_wins(configs):
    written(configs, ["gpu=8gb"], {"memory.micro_batch": Value(512, "fits")})
    assert compose(["experiment=mine", "memory.micro_batch=64"], config_dir=configs).config.memory.micro_batch == 64


def test_a_file_that_is_there_is_kept_unless_told(configs):
    written(configs, ["gpu=8gb"], {})
    before = (configs / "experiment" / "mine.yaml").read_text()
    with pytest.raises(ConfigError, match=r"is there already\. Add --force"):
        written(configs, ["gpu=24gb"], {})
    assert (configs / "experiment" / "mine.yaml").read_text() == before
    written(configs, ["gpu=24gb"], {}, replaces=True)
    assert compose(["experiment=mine"], config_dir=configs).choices["gpu"] == "24gb"


def test_no_secret_is_written(configs):
    composed = compose(["gpu=8gb"], config_dir=configs)
    composed.resolved["workload"]["data"]["api_token"] = "***"  # as `Composed` shows any
    path = write_experiment("mine", composed, {}, heading="")
    assert "api_token" not in path.read_text()


@pytest.mark.slow
def test_choices_that_break_a_rule_alone_are_written_with_what_was_typed(configs):
    (configs / "loader" / "odd.yaml").write_text("num_workers: 0\nprefetch_factor: 4\n")
    with pytest.raises(ConfigError, match="prefetch_factor"):
        compose(["loader=odd"], config_dir=configs)
    before, _ = written(configs, ["loader=odd", "loader.num_workers=2"], {})
    after = compose(["experiment=mine"], config_dir=configs)
    assert after.resolved["loader"] == before.resolved["loader"]


def test_what_can_not_be_written_is_told_and_leaves_nothing(configs, monkeypatch):
    def refuse(*given):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.replace", refuse)
    before = sorted((configs / "experiment").iterdir())
    with pytest.raises(ConfigError, match=r"mine\.yaml can't be written: No space left on device\. Free space"):
        written(configs, ["gpu=8gb"], {})
    assert sorted((configs / "experiment").iterdir()) == before
