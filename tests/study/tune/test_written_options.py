"""Options that are made of a record, and the words that are typed beside them."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from wellfed import project
from wellfed.config.compose import compose
from wellfed.config.files.option_file import Value
from wellfed.errors import ConfigError
from wellfed.study.tune import written_options
from wellfed.study.tune.written_options import free_paths, option_text, option_values, other_overrides

RECORD: dict[str, Any] = {
    "plan": {
        "loader.num_workers": {"value": 2, "because": "one core is left", "source": "measured"},
        "memory.micro_batch": {"value": 64, "because": "fits", "source": "predicted"},
        "memory.accumulate": {"value": 4, "because": "256 / 64", "source": "predicted"},
    },
    "config": {
        "loader": {"num_workers": None, "timeout_s": 60, "skip_ids": [3]},
        "memory": {"on_oom": "fail"},
    },
}


def test_an_option_has_what_was_planned_then_what_was_configured_and_says_why():
    text = option_text("loader", RECORD, "a heading")
    assert yaml.safe_load(text) == {"num_workers": 2, "timeout_s": 60}
    assert text.startswith("# a heading\n")
    assert "# measured: one core is left\nnum_workers: 2\n" in text
    assert yaml.safe_load(option_text("memory", RECORD, "")) == {
        "micro_batch": 64,
        "accumulate": None,
        "on_oom": "fail",
    }


def test_words_of_the_options_and_of_the_sweep_are_left_out_those_of_the_data_stay():
    overrides = [
        *("workload=recsys", "loader=balanced", "loader.num_workers=2", "++memory.features=cache"),
        *("+workload.data.scale=0.5", "gpu.precision=bf16-mixed", "sweep=quick", "logger=none", "telemetry=none"),
        *("hydra.job.chdir=false", "hydra/launcher=basic", "loader.skip_ids=[3]"),
    ]
    kept = ["workload=recsys", "+workload.data.scale=0.5", "gpu.precision=bf16-mixed", "loader.skip_ids=[3]"]
    assert other_overrides(overrides, ["loader", "memory"]) == kept


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("balanced", "tune.name=balanced: is an option of loader that others rely on; .* Write tune.name=my_balanced."),
        ("8gb", "tune.name=8gb: becomes the name of a file .* Write tune.name=my_8gb."),
        ("mine", r"tune.name=mine: .*loader.mine.yaml: there already. Do this."),
    ],
)
def test_a_name_that_will_not_do_is_refused(tmp_path: Path, name: str, told: str):
    (tmp_path / "loader").mkdir()
    (tmp_path / "loader" / "mine.yaml").write_text("num_workers: 1\n")
    with pytest.raises(ConfigError, match=told):
        free_paths(
            name, ["loader", "memory"], tmp_path, flag="tune.name=", may_replace=lambda _: False, way_out="Do this."
        )


def test_all_shipped_options_are_known():
    assert set(written_options._SHIPPED) == {"loader", "memory"}
    for group, names in written_options._SHIPPED.items():
        assert {path.stem for path in (project.configs() / group).glob("*.yaml")} == set(names)


def test_a_knob_is_what_was_planned_else_what_was_configured():
    record = {
        "plan": {
            "loader.num_workers": {"value": 6, "because": "16 cores", "source": "measured"},
            "loader.prefetch_factor": {"value": None, "because": "torch's default", "source": "rule"},
            "memory.micro_batch": {"value": 512, "because": "fits", "source": "rule"},
        },
        "config": {"loader": {"num_workers": None, "timeout_s": 60}, "memory": {"features": "cache"}},
    }
    assert option_values("loader", record) == {
        "num_workers": Value(6, "measured: 16 cores"),
        "prefetch_factor": Value(None, "rule: torch's default"),
        "timeout_s": Value(60, "as configured"),
    }


def test_settings_that_only_a_plan_has_are_left_to_the_next_plan(tmp_path: Path):
    """A DataLoader as it came has its own numbers of workers."""
    configs = Path(shutil.copytree(project.configs(), tmp_path / "configs"))
    planned = {"loader.backend": "own", "loader.num_workers": 3, "loader.pin_memory": False}
    wanted = compose(["loader=own"], config_dir=configs).resolved
    entries = {knob: {"value": value, "because": "", "source": "set"} for knob, value in planned.items()}
    for group in ("loader", "memory"):
        (configs / group / "mine.yaml").write_text(option_text(group, {"plan": entries, "config": wanted}, ""))
    found = compose(["loader=mine", "memory=mine"], config_dir=configs).resolved
    assert (found["loader"], found["memory"]) == (wanted["loader"], wanted["memory"])
