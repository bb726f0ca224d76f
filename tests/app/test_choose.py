"""The winner of a sweep as options, and the ranks of it, as the commands are typed."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from tests.sweep.made import PLAN, failed_row, row, rows, sweep_file, write, write_record
from wellfed.app import choose, cli
from wellfed.config.compose import compose
from wellfed.config.session import default_config_dir


@pytest.fixture
def configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the options; nothing is written to the project's."""
    copy = tmp_path / "configs"
    shutil.copytree(default_config_dir(), copy)
    monkeypatch.setattr(choose, "default_config_dir", lambda: copy)
    return copy


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    return write(tmp_path / "logs" / "recsys" / "sweeps" / "quick")


def options(configs: Path) -> set[str]:
    return {path.relative_to(configs).as_posix() for path in configs.rglob("*.yaml")}


@pytest.mark.parametrize(
    "plan",
    [
        PLAN,
        {**PLAN, "loader.backend": "torch", "loader.persistent_workers": True, "loader.timeout_s": 60},
        {**PLAN, "loader.backend": "inline", "loader.num_workers": 0, "loader.prefetch_factor": None},
    ],
    ids=["threads", "torch", "inline"],
)
def test_the_options_compose_to_what_the_winner_had(configs: Path, sweep: Path, plan, capsys):
    for folder in sweep.iterdir():
        if folder.is_dir():
            write_record(folder, plan=plan)
    assert cli.main(["choose", str(sweep), "--name", "my4090"]) == 0
    found = compose(["loader=my4090", "memory=my4090"], config_dir=configs).config
    for knob in ("backend", "num_workers", "prefetch_factor", "device_prefetch", "timeout_s", "pin_memory"):
        value = getattr(found.loader, knob)
        assert getattr(value, "value", value) == plan[f"loader.{knob}"], knob
    assert (found.memory.micro_batch, found.memory.accumulate) == (512, None)
    assert found.memory.features.value == "cache"
    assert (found.loader.skip_ids, found.loader.max_skipped) == ([], 0)
    said = capsys.readouterr().out
    assert "python src/train.py loader=my4090 memory=my4090 workload=recsys" in said
    assert "gpu.precision=bf16-mixed" in said
    assert "# Record " in (configs / "loader" / "my4090.yaml").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--name", "4090"], "Write --name my_4090."),
        (["--name", "on"], "Write --name my_on."),
        (["--name", "a/b"], "Write --name my_a_b."),
        (["--name", "baseline", "--force"], "is an option of loader that others rely on"),
        (["--name", "auto", "--force"], "is an option of loader and memory"),
        (["--name", "mine", "--point", "0000000000"], "none is called so"),
    ],
)
def test_what_can_not_be_chosen_leaves_nothing(configs: Path, sweep: Path, words, message, capsys):
    before = options(configs)
    assert cli.main(["choose", str(sweep), *words]) == 2
    assert message in capsys.readouterr().err
    assert options(configs) == before


def test_a_file_of_that_name_stays_unless_told(configs: Path, sweep: Path, capsys):
    mine = configs / "memory" / "mine.yaml"
    mine.write_text("features: dynamic\n")
    assert cli.main(["choose", str(sweep), "--name", "mine"]) == 2
    assert "Add --force" in capsys.readouterr().err
    assert not (configs / "loader" / "mine.yaml").exists()
    assert cli.main(["choose", str(sweep), "--name", "mine", "--force"]) == 0
    assert yaml.safe_load(mine.read_text())["features"] == "cache"


def test_a_point_without_a_rate_is_refused_with_its_reason(configs: Path, sweep: Path, capsys):
    failed = next(each for each in rows(sweep_file()) if each.status == "oom")
    assert cli.main(["choose", str(sweep), "--name", "mine", "--point", failed.point]) == 2
    assert "has no rate; it is oom: CUDA ran out of memory" in capsys.readouterr().err


def test_a_sweep_in_which_nothing_is_ok_has_no_winner(configs: Path, tmp_path: Path, capsys):
    file = sweep_file({"seed": ("1", "2")})
    folder = write(tmp_path / "all_bad", file, [failed_row(point, "failed") for point in file.points])
    assert cli.main(["choose", str(folder), "--name", "mine"]) == 2
    assert "no point has a rate (2 failed)" in capsys.readouterr().err


def test_a_tie_names_the_one_that_needs_less_memory(configs: Path, tmp_path: Path, capsys):
    file = sweep_file({"seed": ("1", "2")})
    first, second = file.points
    made = [row(first, 100.0, own=0.2, peak_memory_gib=4.0), row(second, 99.0, own=0.2, peak_memory_gib=2.0)]
    folder = write(tmp_path / "tied", file, made)
    assert cli.main(["choose", str(folder), "--name", "mine"]) == 0
    assert f"{second.id} needs the least memory of them, 2.00 GiB instead of 4.00 GiB" in capsys.readouterr().out


def test_flags_of_the_sweep_are_in_the_line_to_type(configs: Path, tmp_path: Path, capsys):
    file = replace(sweep_file({"seed": ("1", "2")}), flags=("--config-dir=conf",))
    folder = write(tmp_path / "there", file, [row(point) for point in file.points])
    assert cli.main(["choose", str(folder), "--name", "mine"]) == 0
    assert "python src/train.py --config-dir=conf loader=mine" in capsys.readouterr().out


def test_the_leaderboard_is_printed_and_its_files_are_made_anew(sweep: Path, tmp_path: Path, capsys):
    assert cli.main(["leaderboard", "quick", "--log-dir", str(tmp_path / "logs")]) == 0
    said = capsys.readouterr().out
    assert "17 ok" in said
    assert "oom: loader=aggressive memory=dynamic" in said
    assert all((sweep / f"leaderboard.{kind}").is_file() for kind in ("csv", "md", "html"))
    assert cli.main(["leaderboard", str(sweep), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["entries"]) == 24


@pytest.mark.parametrize("asked", ["quikc", "", "no/such/folder"])
def test_a_sweep_that_is_not_there_is_told_with_those_that_are(sweep: Path, tmp_path: Path, asked: str, capsys):
    assert cli.main(["leaderboard", asked, "--log-dir", str(tmp_path / "logs")]) == 2
    assert str(sweep) in capsys.readouterr().err


def test_a_damaged_sweep_is_told(sweep: Path, capsys):
    (sweep / "sweep.json").write_text("{")
    assert cli.main(["leaderboard", str(sweep)]) == 2
    assert "can't be read" in capsys.readouterr().err
