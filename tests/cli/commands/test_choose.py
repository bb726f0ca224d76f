import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.kit import made
from tests.kit.few import few
from wellfed import project
from wellfed.cli import main as cli
from wellfed.config.compose import Composed, compose
from wellfed.config.entry import config_flags, main
from wellfed.config.schema import RunConfig
from wellfed.record.entries import RunRecord
from wellfed.study.ledger import Read
from wellfed.study.ranking.ranking import leaderboard

NONE_AHEAD = {"prefetch_factor": None, "persistent_workers": False, "timeout_s": 0}
LOADERS: Mapping[str, dict[str, Any]] = {
    "inline": {"backend": "inline", "num_workers": 0, "pin_memory": False, "device_prefetch": 0, **NONE_AHEAD},
    "torch": {"backend": "torch", "num_workers": 0, "pin_memory": True, "device_prefetch": 0, **NONE_AHEAD},
    "torch with workers": {
        "backend": "torch",
        "num_workers": 4,
        "pin_memory": True,
        "device_prefetch": 2,
        "prefetch_factor": 2,
        "persistent_workers": True,
        "timeout_s": 60,
    },
    "threads": {
        "backend": "threads",
        "num_workers": 6,
        "pin_memory": True,
        "device_prefetch": 2,
        "prefetch_factor": 8,
        "persistent_workers": False,
        "timeout_s": 0,
    },
    "processes": {
        "backend": "processes",
        "num_workers": 3,
        "pin_memory": False,
        "device_prefetch": 0,
        "prefetch_factor": 4,
        "persistent_workers": True,
        "timeout_s": 0,
    },
}
SWEEP = made.sweep_file()
ROWS = made.rows(SWEEP)
BOARD = leaderboard(SWEEP, Read(tuple(ROWS)))
BEST = BOARD.ranked[0]


@pytest.fixture(autouse=True)
def configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the project's, which alone is written to."""
    copy = tmp_path / "project" / "configs"
    shutil.copytree(project.configs(), copy)
    (copy.parent / "src").symlink_to(project.sources())
    monkeypatch.setenv(project.VARIABLE, str(copy.parent))
    monkeypatch.setattr(sys, "path", [*sys.path])  # commands put the project first
    return copy


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return made.write(tmp_path / "logs" / "recsys" / "sweeps" / "quick", SWEEP, ROWS)


def tree(configs: Path) -> dict[str, bytes]:
    return {str(path.relative_to(configs)): path.read_bytes() for path in configs.rglob("*") if path.is_file()}


def with_plan(folder: Path, loader: Mapping[str, Any]) -> None:
    plan = {**made.PLAN, **{f"loader.{knob}": value for knob, value in loader.items()}}
    made.write_record(folder / BEST.row.folder, plan=plan)


def choose_from(folder: Path, *words: str, name: str = "mine") -> int:
    return cli.main(["choose", str(folder), "--name", name, *words])


@pytest.mark.parametrize("kind", few(LOADERS, 3))
def test_the_two_files_are_options_with_the_planned_values(folder: Path, configs: Path, kind: str):
    with_plan(folder, LOADERS[kind])
    assert choose_from(folder) == 0
    found = compose(["loader=mine", "memory=mine"], config_dir=configs).resolved
    planned = LOADERS[kind]
    assert found["loader"] == {**planned, "skip_ids": [], "max_skipped": 0}
    memory = found["memory"]
    assert (memory["features"], memory["micro_batch"], memory["accumulate"]) == ("cache", 512, None)
    assert (memory["checkpoint_activations"], memory["on_oom"]) == (False, "retry")


def test_samples_that_are_known_bad_are_no_part_of_an_option(folder: Path, configs: Path):
    assert choose_from(folder) == 0
    written = yaml.safe_load((configs / "loader" / "mine.yaml").read_text())
    assert not {"skip_ids", "max_skipped"} & set(written)


def test_every_number_has_its_reason_and_the_head_says_where_it_is_from(folder: Path, configs: Path):
    assert choose_from(folder) == 0
    for group in ("loader", "memory"):
        lines = (configs / group / "mine.yaml").read_text().splitlines()
        assert lines[0] == f"# python -m wellfed choose {folder} --name mine"
        assert lines[1] == f"# Record {BEST.row.folder} of 2026-11-21T18:00:00+00:00: {shlex.join(BEST.overrides)}"
        assert f"rank {BEST.label} of 17, on {BEST.row.machine}; {made.DEVICE}." in lines[2]  # not of the last command
        assert all(above.startswith("#") for above, line in pairwise(lines) if line[0] != "#")
    text = (configs / "loader" / "mine.yaml").read_text()
    assert "# measured: why loader.num_workers\nnum_workers: 6\n" in text


def test_what_was_chosen_and_how_to_use_it_are_told(folder: Path, configs: Path, capsys: pytest.CaptureFixture[str]):
    assert choose_from(folder) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{BEST.point}: ")
    assert f"Written: {configs / 'loader' / 'mine.yaml'}, {configs / 'memory' / 'mine.yaml'}\n" in out
    use = out.splitlines()[-1]
    assert use.startswith("Use it: python src/train.py loader=mine memory=mine ")
    words = shlex.split(use)[4:]
    assert {"workload=recsys", "workload.data.scale=0.5", "gpu.precision=bf16-mixed"} < set(words)
    assert not any(word.startswith(("loader=b", "loader=a", "memory=cache")) for word in words)
    assert compose(words, config_dir=configs).resolved["gpu"]["precision"] == "bf16-mixed"


def test_the_command_runs_what_was_measured_beside_an_experiment(
    tmp_path: Path, configs: Path, capsys: pytest.CaptureFixture[str]
):
    """An experiment sets knobs of the loader, after the option."""
    sweep = made.sweep_file({"loader": ("balanced",)}, ("workload=forecast", "experiment=forecast_starved"))
    folder = made.write(tmp_path / "sweep", sweep, [made.row(sweep.points[0])])
    made.write_record(folder / sweep.points[0].id, plan={**made.PLAN, "memory.micro_batch": 64})
    assert choose_from(folder) == 0
    words = shlex.split(capsys.readouterr().out.splitlines()[-1])[4:]
    found = compose(words, config_dir=configs).resolved
    wanted = {knob: value for knob, value in made.PLAN.items() if knob.startswith("loader.")}
    wanted |= {"loader.skip_ids": [3], "loader.max_skipped": 5, "memory.micro_batch": 64, "memory.accumulate": None}
    assert {knob: found[knob.partition(".")[0]][knob.partition(".")[2]] for knob in wanted} == wanted


@pytest.mark.parametrize(("status", "started_at"), [("ok", "2026-11-22T18:00:00+00:00"), ("killed", None)])
def test_the_record_of_another_attempt_leaves_nothing(
    folder: Path, configs: Path, capsys: pytest.CaptureFixture[str], status: Any, started_at: str | None
):
    record = RunRecord.read(folder / BEST.row.folder)
    record.status, record.started_at = status, started_at or record.started_at
    record.write(folder / BEST.row.folder)
    before = tree(configs)
    assert choose_from(folder) == 2
    assert f"its record is of another attempt ({status}, {record.started_at})" in capsys.readouterr().err
    assert tree(configs) == before


def test_where_configurations_are_searched_is_told_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    sweep = made.sweep_file(flags=("--config-dir", "my configs"))
    folder = made.write(tmp_path / "sweep", sweep, ROWS)
    assert choose_from(folder) == 0
    assert "Use it: python src/train.py --config-dir 'my configs' loader=mine" in capsys.readouterr().out


def test_the_options_are_written_where_the_command_searches(
    tmp_path: Path, configs: Path, capsys: pytest.CaptureFixture[str]
):
    other, more = Path(shutil.copytree(configs, tmp_path / "other")), tmp_path / "more"
    (more / "gpu").mkdir(parents=True)
    (more / "gpu" / "laptop.yaml").write_text("memory_gib: 3.5\n")
    typed = [f"--config-path={other}", f"hydra.searchpath=[file://{more}]"]
    sweep = made.sweep_file(fixed=(*made.FIXED, "gpu=laptop"), flags=config_flags(["-m", *typed, "seed=1,2"]))
    points = {point.values["loader"]: point for point in sweep.points}
    folder = made.write(tmp_path / "sweep", sweep, [made.row(points["balanced"])])
    made.write_record(folder / points["balanced"].id, plan=made.PLAN)
    assert choose_from(folder) == 0
    words = shlex.split(capsys.readouterr().out.splitlines()[-1])[4:]
    assert words[:4] == [*typed, "loader=mine", "memory=mine"]
    jobs: list[Composed[RunConfig]] = []
    assert main("train", lambda composed: jobs.append(composed) or 0, words) == 0
    assert jobs[0].choices["loader"] == "mine"
    assert [(each / "loader" / "mine.yaml").is_file() for each in (other, configs)] == [True, False]


def test_a_tie_is_told(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    sweep = made.sweep_file({"loader": ("balanced", "aggressive")})
    less, best = sweep.points
    rows = [made.row(less, 99.9, peak_memory_gib=3.0), made.row(best, 100.0, peak_memory_gib=5.0)]
    tied = made.write(tmp_path / "tied", sweep, rows)
    assert choose_from(tied) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{best.id}: ")
    assert f"1 other point can't be told apart from it (rank 1=); {less.id} needs the least memory" in out


def test_another_point_can_be_chosen(folder: Path, configs: Path, capsys: pytest.CaptureFixture[str]):
    other = BOARD.ranked[-1]
    made.write_record(folder / other.row.folder, plan={**made.PLAN, "loader.num_workers": 2})
    assert choose_from(folder, "--point", other.point) == 0
    assert capsys.readouterr().out.startswith(f"{other.point}: ")
    assert yaml.safe_load((configs / "loader" / "mine.yaml").read_text())["num_workers"] == 2


@pytest.mark.parametrize(
    "name", few(["4090", "on", "yes", "null", "a/b", "../up", "", "a.b", "a b", "Off", "é", "mine\n"], 5)
)
def test_a_name_that_will_not_do_leaves_nothing(
    folder: Path, configs: Path, capsys: pytest.CaptureFixture[str], name: str
):
    before = tree(configs.parent)
    assert choose_from(folder, "--force", name=name) == 2
    err = capsys.readouterr().err
    assert "becomes the name of a file and an option" in err
    assert "Write --name my_" in err
    assert tree(configs.parent) == before


@pytest.mark.parametrize("name", few(["baseline", "auto", "cache", "tight", "balanced"], 2))
@pytest.mark.parametrize("words", [(), ("--force",)])
def test_a_shipped_option_is_never_replaced(
    folder: Path, configs: Path, capsys: pytest.CaptureFixture[str], name: str, words: tuple[str, ...]
):
    before = tree(configs)
    assert choose_from(folder, *words, name=name) == 2
    err = capsys.readouterr().err
    assert "that others rely on; it is not replaced" in err
    assert f"Write --name my_{name}." in err
    assert tree(configs) == before


@pytest.mark.parametrize("there", ["loader", "memory"])
def test_one_of_both_files_that_is_there_is_kept_without_force(
    folder: Path, configs: Path, capsys: pytest.CaptureFixture[str], there: str
):
    (configs / there / "mine.yaml").write_text("# my work\n")
    before = tree(configs)
    assert choose_from(folder) == 2
    err = capsys.readouterr().err
    assert f"{configs / there / 'mine.yaml'}: there already. Add --force, or take another name." in err
    assert tree(configs) == before
    assert choose_from(folder, "--force") == 0
    assert "my work" not in (configs / there / "mine.yaml").read_text()
    compose(["loader=mine", "memory=mine"], config_dir=configs)


def test_without_an_ok_point_nothing_is_written(tmp_path: Path, configs: Path, capsys: pytest.CaptureFixture[str]):
    before = tree(configs)
    folder = made.write(tmp_path / "sweep", SWEEP, [made.failed_row(point, "oom") for point in SWEEP.points])
    assert choose_from(folder) == 2
    assert "no point has a rate (24 oom), so there is nothing to choose." in capsys.readouterr().err
    assert tree(configs) == before


@pytest.mark.parametrize(
    ("point", "message"),
    [
        ("zzz", "sweep quick has 24 points, and none is called so. Near it: "),
        (next(row.point for row in ROWS if row.status == "oom"), "has no rate; it is oom: CUDA ran out of memory"),
    ],
)
def test_an_unknown_or_failed_point_leaves_nothing(
    folder: Path, configs: Path, capsys: pytest.CaptureFixture[str], point: str, message: str
):
    before = tree(configs)
    assert choose_from(folder, "--point", point) == 2
    captured = capsys.readouterr()
    assert f"--point {point}: {message}" in captured.err
    assert captured.out == ""
    assert tree(configs) == before


@pytest.mark.parametrize("text", [None, "{", "{}", '{"schema": 99}'])
def test_a_record_that_can_not_be_read_leaves_nothing(
    folder: Path, configs: Path, capsys: pytest.CaptureFixture[str], text: str | None
):
    path = folder / BEST.row.folder / "run.json"
    path.unlink() if text is None else path.write_text(text)
    before = tree(configs)
    assert choose_from(folder) == 2
    err = capsys.readouterr().err
    assert f"point {BEST.point}: its record can't be read" in err
    assert "sweep.retry=[ok]" in err
    assert tree(configs) == before


def test_secrets_stay_masked(tmp_path: Path, configs: Path, capsys: pytest.CaptureFixture[str]):
    """No file of the sweep has them."""
    sweep = made.sweep_file(
        {"loader": ("balanced",), "+workload.data.token": ("***1", "***2")},
        ("workload=recsys", "+workload.data.password='***'"),
    )
    rows = [made.row(point, rate) for point, rate in zip(sweep.points, (100.0, 200.0), strict=True)]
    assert choose_from(made.write(tmp_path / "sweep", sweep, rows)) == 0
    typed = "workload=recsys '+workload.data.password='\"'\"'***'\"'\"'' loader=balanced '+workload.data.token=***2'"
    for group in ("loader", "memory"):
        assert typed in (configs / group / "mine.yaml").read_text()
    use = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert {"+workload.data.password='***'", "+workload.data.token=***2"} < set(use)


def test_the_sweep_is_found_by_name(
    folder: Path, tmp_path: Path, configs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["choose", "quik", "--name", "mine"]) == 2
    assert "Did you mean quick?" in capsys.readouterr().err
    assert cli.main(["choose", "quick", "--name", "mine"]) == 0
    assert (configs / "memory" / "mine.yaml").is_file()


def test_no_value_reaches_terminal_or_yaml_as_a_control_character(
    tmp_path: Path, configs: Path, capsys: pytest.CaptureFixture[str]
):
    odd = "\x1b[31mnow\x07"
    folder = made.write(tmp_path / "sweep", SWEEP, [replace(row, started_at=odd) for row in ROWS])
    with_plan(folder, LOADERS["inline"])
    record = RunRecord.read(folder / BEST.row.folder)
    record.started_at = odd
    for planned in record.plan.values():
        planned["because"] = "\x1b[2J\n evil"
    record.write(folder / BEST.row.folder)
    assert choose_from(folder) == 0
    captured = capsys.readouterr()
    texts = [
        captured.out,
        captured.err,
        *((configs / group / "mine.yaml").read_text() for group in ("loader", "memory")),
    ]
    assert not any(set(text) & {"\x1b", "\x07"} for text in texts)
    assert any("\\x1b[31mnow" in text for text in texts)
