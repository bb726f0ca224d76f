import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.kit import made
from tests.kit.few import few
from wellfed import project
from wellfed.cli import main as cli
from wellfed.config.compose import Composed, compose
from wellfed.config.entry import main
from wellfed.config.schema import RunConfig
from wellfed.record.entries import RunRecord
from wellfed.study.ranking.ranking import leaderboard
from wellfed.study.rows import Rows

THREADS = {
    **{"backend": "threads", "num_workers": 6, "pin_memory": True, "device_prefetch": 2, "prefetch_factor": 8},
    **{"persistent_workers": False, "timeout_s": 0},
}
SWEEP = made.sweep_file()
ROWS = made.rows(SWEEP)
BOARD = leaderboard(SWEEP, Rows(tuple(ROWS)))
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


@pytest.fixture
def mine(configs: Path) -> Path:
    """The file that is written."""
    return configs / "experiment" / "mine.yaml"


def with_plan(folder: Path, loader: Mapping[str, Any]) -> None:
    plan = {**made.PLAN, **{f"loader.{knob}": value for knob, value in loader.items()}}
    made.write_record(folder / BEST.row.folder, plan=plan)


def choose_from(folder: Path, *words: str, name: str = "mine") -> int:
    return cli.main(["choose", str(folder), "--name", name, *words])


def test_the_experiment_has_what_was_measured(folder: Path, configs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with_plan(folder, THREADS)
    assert choose_from(folder) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{BEST.point}: ")
    assert f"Written: {configs / 'experiment' / 'mine.yaml'}\n" in out
    assert out.splitlines()[-1] == "Use it: python src/train.py experiment=mine"
    found = compose(["experiment=mine"], config_dir=configs)
    assert found.choices["workload"] == "recsys"
    assert found.resolved["loader"] == {**THREADS, "skip_ids": [], "max_skipped": 0}
    memory = found.resolved["memory"]
    assert (memory["features"], memory["micro_batch"], memory["accumulate"]) == ("cache", 512, None)
    assert found.resolved["workload"]["data"]["scale"] == 0.5
    assert found.resolved["gpu"]["precision"] == "bf16-mixed"


@pytest.mark.slow
def test_every_number_has_its_reason_and_the_head_says_where_it_is_from(folder: Path, mine: Path) -> None:
    assert choose_from(folder) == 0
    lines = mine.read_text().splitlines()
    assert lines[1] == f"# python -m wellfed choose {folder} --name mine"
    assert lines[2] == f"# Record {BEST.row.folder} of 2026-11-21T18:00:00+00:00: {shlex.join(BEST.overrides)}"
    assert f"rank {BEST.label} of 17, on {BEST.row.machine}; {made.DEVICE}." in lines[3]  # not of the last command
    body = lines[lines.index("loader:") :]
    leaves = [(above, line) for above, line in pairwise(body) if line.strip()[0] != "#" and not line.endswith(":")]
    assert all(above.strip().startswith("#") for above, _ in leaves)
    assert "  # measured: why loader.num_workers\n  num_workers: 6\n" in mine.read_text()


@pytest.mark.slow
def test_knobs_of_an_experiment_in_the_sweep_are_kept(tmp_path: Path, configs: Path) -> None:
    """It sets knobs of the loader, after the option."""
    sweep = made.sweep_file({"loader": ("balanced",)}, ("workload=forecast", "experiment=forecast_starved"))
    folder = made.write(tmp_path / "sweep", sweep, [made.row(sweep.points[0])])
    made.write_record(folder / sweep.points[0].id, plan={**made.PLAN, "memory.micro_batch": 64})
    assert choose_from(folder) == 0
    found = compose(["experiment=mine"], config_dir=configs).resolved
    wanted = {knob: value for knob, value in made.PLAN.items() if knob.startswith("loader.")}
    wanted |= {"memory.micro_batch": 64, "memory.accumulate": None}
    assert {knob: found[knob.partition(".")[0]][knob.partition(".")[2]] for knob in wanted} == wanted
    assert found["gpu"]["tf32"] is False


def test_it_is_written_where_the_command_searches(
    tmp_path: Path, configs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other, more = Path(shutil.copytree(configs, tmp_path / "my configs")), tmp_path / "more"
    (more / "gpu").mkdir(parents=True)
    (more / "gpu" / "laptop.yaml").write_text("memory_gib: 3.5\n")
    typed = [f"--config-path={other}", f"hydra.searchpath=[file://{more}]"]
    sweep = made.sweep_file(fixed=(*made.FIXED, "gpu=laptop", "seed=3"), flags=tuple(typed))
    points = {point.values["loader"]: point for point in sweep.points}
    folder = made.write(tmp_path / "sweep", sweep, [made.row(points["balanced"])])
    made.write_record(folder / points["balanced"].id, plan=made.PLAN)
    assert choose_from(folder) == 0
    words = shlex.split(capsys.readouterr().out.splitlines()[-1])[4:]
    assert words == [*typed, "seed=3", "experiment=mine"]
    jobs: list[Composed[RunConfig]] = []
    assert main("train", lambda composed: jobs.append(composed) or 0, words) == 0
    assert (jobs[0].choices["gpu"], jobs[0].config.gpu.memory_gib) == ("laptop", 3.5)
    assert [(each / "experiment" / "mine.yaml").is_file() for each in (other, configs)] == [True, False]


@pytest.mark.slow
def test_a_tie_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = made.sweep_file({"loader": ("balanced", "aggressive")})
    less, best = sweep.points
    rows = [made.row(less, 99.9, peak_memory_gib=3.0), made.row(best, 100.0, peak_memory_gib=5.0)]
    assert choose_from(made.write(tmp_path / "tied", sweep, rows)) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{best.id}: ")
    assert f"1 other point can't be told apart from it (rank 1=); {less.id} needs the least memory" in out


@pytest.mark.slow
def test_another_point_can_be_chosen(folder: Path, mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = BOARD.ranked[-1]
    made.write_record(folder / other.row.folder, plan={**made.PLAN, "loader.num_workers": 2})
    assert choose_from(folder, "--point", other.point) == 0
    assert capsys.readouterr().out.startswith(f"{other.point}: ")
    assert "num_workers: 2\n" in mine.read_text()


@pytest.mark.parametrize("name", few(["4090", "on", "a/b", "../up", ""], 2))
def test_a_name_that_will_not_do_leaves_nothing(
    folder: Path, configs: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    before = {*configs.rglob("*")}
    assert choose_from(folder, "--force", name=name) == 2
    err = capsys.readouterr().err
    assert "becomes the name of a file" in err
    assert "Write --name my_" in err
    assert {*configs.rglob("*")} == before


def test_a_file_that_is_there_is_kept_without_force(
    folder: Path, configs: Path, mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine.write_text("# my work\n")
    assert choose_from(folder) == 2
    assert f"--name mine: {mine} is there already. Add --force, or take another name." in capsys.readouterr().err
    assert mine.read_text() == "# my work\n"
    assert choose_from(folder, "--force") == 0
    assert "my work" not in mine.read_text()


@pytest.mark.parametrize(
    ("point", "message"),
    [
        ("zzz", "sweep quick has 24 points, and none is called so. python -m wellfed leaderboard lists them."),
        (next(row.point for row in ROWS if row.status == "oom"), "has no rate; it is oom: CUDA ran out of memory"),
    ],
)
def test_an_unknown_or_failed_point_leaves_nothing(
    folder: Path, mine: Path, capsys: pytest.CaptureFixture[str], point: str, message: str
) -> None:
    assert choose_from(folder, "--point", point) == 2
    captured = capsys.readouterr()
    assert f"--point {point}: {message}" in captured.err
    assert captured.out == ""
    assert not mine.exists()


def test_secrets_stay_masked_and_are_typed_beside_it(
    tmp_path: Path, mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No file of the sweep has them."""
    sweep = made.sweep_file(
        {"loader": ("balanced",), "+workload.data.token": ("***1", "***2")},
        ("workload=recsys", "+workload.data.password='***'"),
    )
    rows = [made.row(point, rate) for point, rate in zip(sweep.points, (100.0, 200.0), strict=True)]
    assert choose_from(made.write(tmp_path / "sweep", sweep, rows)) == 0
    assert "password:" not in mine.read_text()
    use = shlex.split(capsys.readouterr().out.splitlines()[-1])[4:]
    assert use == ["+workload.data.password='***'", "+workload.data.token=***2", "experiment=mine"]


@pytest.mark.slow
def test_no_value_reaches_terminal_or_yaml_as_a_control_character(
    tmp_path: Path, mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = "\x1b[31mnow\x07"
    folder = made.write(tmp_path / "sweep", SWEEP, [replace(row, started_at=odd) for row in ROWS])
    record = RunRecord.read(folder / BEST.row.folder)
    record.started_at = odd
    for planned in record.plan.values():
        planned["because"] = "\x1b[2J\n evil"
    record.write(folder / BEST.row.folder)
    assert choose_from(folder) == 0
    captured = capsys.readouterr()
    texts = [captured.out, captured.err, mine.read_text()]
    assert not any(set(text) & {"\x1b", "\x07"} for text in texts)
    assert any("\\x1b[31mnow" in text for text in texts)
