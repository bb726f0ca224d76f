import sys
from pathlib import Path

import pytest
import yaml

from tests.end_to_end.commands import only_folder, record_of, run
from wellfed.cli import main as cli
from wellfed.cli.commands import add
from wellfed.errors import ConfigError

BLANK = Path(add.__file__).parents[1] / "blank"
FILES = [
    *(f"src/workloads/mine/{name}" for name in ("__init__.py", "model.py", "data.py", "README.md")),
    "configs/workload/mine.yaml",
]

QUIET = ("logger=none", "telemetry=none")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project of one workload, to which the command adds."""
    root = project_with(tmp_path / "project", "recsys", "workloads.recsys.model.Recommender")
    monkeypatch.setenv("WELLFED_PROJECT", str(root))
    monkeypatch.setattr(sys, "path", [*sys.path])  # commands put the project first
    return root


def project_with(root: Path, default: str, target: str) -> Path:
    (root / "configs" / "workload").mkdir(parents=True)
    (root / "configs" / "train.yaml").write_text(f"defaults:\n- run_schema\n- gpu: auto\n- workload: {default}\n")
    (root / "configs" / "workload" / f"{default}.yaml").write_text(f"model:\n  _target_: {target}\n")
    return root


def files(root: Path) -> list[str]:
    """Without those that were there before."""
    found = {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}
    return sorted(found - {"configs/train.yaml", "configs/workload/recsys.yaml"})


def test_what_is_written(project: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["add", "workload", "mine"]) == 0
    assert files(project) == sorted(FILES)
    out = capsys.readouterr().out
    assert all(file in out for file in FILES)
    assert "python src/train.py workload=mine trainer.max_steps=50" in out


def test_only_the_names_are_changed(project: Path):
    """The written files pass `make check`, like those of the repository."""
    add.write_workload("mine")
    for file in FILES:
        name = "workload.yaml" if file.endswith(".yaml") else Path(file).name
        text, template = (project / file).read_text(), (BLANK / name).read_text()
        assert "blank" not in text, file
        if file.endswith(".py"):
            assert text == template
        else:
            assert text.replace("workloads.mine", "wellfed.cli.blank").replace("mine", "blank") == template
    written = yaml.safe_load((project / FILES[-1]).read_text())
    assert written["name"] == "mine"
    assert [written[part]["_target_"].rpartition(".")[0] for part in ("model", "data")] == [
        "workloads.mine.model",
        "workloads.mine.data",
    ]


@pytest.mark.parametrize(
    ("default", "target", "home"),
    [
        ("my_nets", "my_nets.model.Net", "my_nets"),
        ("cats", "my_nets.cats.model.Net", "my_nets"),
        ("cats", "my_nets.models.resnet.model.Net", "my_nets.models.resnet"),
    ],
)
def test_a_new_one_goes_beside_the_default_one_or_below_it(tmp_path: Path, default: str, target: str, home: str):
    root = project_with(tmp_path, default, target)
    add.write_workload("mine", root)
    assert root.joinpath("src", *home.split("."), "mine", "model.py").is_file()
    assert f"_target_: {home}.mine.model.Network" in (root / "configs" / "workload" / "mine.yaml").read_text()


@pytest.mark.parametrize(
    ("name", "better"),
    [
        ("My-Net", "my_net"),
        ("3d nets", "my_3d_nets"),
        ("class", "my_class"),
        ("on", "my_on"),
        ("日本", "my_workload"),
        ("../up", "up"),
        ("x" * 41, "x" * 40),
    ],
)
def test_a_name_that_will_not_do_is_refused_with_one_that_will(
    project: Path, capsys: pytest.CaptureFixture[str], name: str, better: str
):
    assert cli.main(["add", "workload", name]) == 2
    err = capsys.readouterr().err
    assert "small letters" in err
    assert f"Write python -m wellfed add workload {better}.\n" in err
    assert files(project) == []
    assert cli.main(["add", "workload", better]) == 0


@pytest.mark.parametrize(
    "there", ["src/workloads/mine/notes.txt", "src/workloads/mine.py", "configs/workload/mine.yaml"]
)
def test_nothing_is_written_over(project: Path, capsys: pytest.CaptureFixture[str], there: str):
    (project / there).parent.mkdir(parents=True, exist_ok=True)
    (project / there).write_text("my work")
    assert cli.main(["add", "workload", "mine"]) == 2
    err = capsys.readouterr().err
    assert "is there already. Take another name" in err
    assert files(project) == [there]
    assert (project / there).read_text() == "my work"


def test_outside_of_a_clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "configs" / "workload").mkdir(parents=True)
    (tmp_path / "configs" / "train.yaml").touch()
    monkeypatch.setenv("WELLFED_PROJECT", str(tmp_path))
    with pytest.raises(ConfigError, match="does not tell where workloads are: .* Run from a full clone"):
        add.write_workload("mine")


@pytest.fixture
def beside(project: Path, tmp_path: Path) -> tuple[Path, dict[str, str], list[str]]:
    """Returns the folder of an added workload's runs, and variables with which this clone's scripts find it."""
    add.write_workload("mine")
    return tmp_path, {"PYTHONPATH": str(project / "src")}, ["--config-dir", str(project / "configs")]


@pytest.mark.slow
def test_it_trains_at_once_and_learns(beside: tuple[Path, dict[str, str], list[str]]):
    cwd, found, flags = beside
    done = run("train.py", *flags, "workload=mine", "trainer.max_steps=50", *QUIET, cwd=cwd, **found)
    assert done.code == 0, done.text
    assert "25.6 % are of the commonest" in done.text
    record = record_of(only_folder(cwd, "mine"))
    assert (record["status"], record["steps"], record["samples"]) == ("ok", 50, 12_608)
    assert record["metrics"]["test/accuracy"] > 2 * 0.256
