"""The command ``wellfed`` in a project of its own that no installer knows: ranks, worker processes, newest run."""

import shutil
from pathlib import Path

import pytest

from tests.end_to_end.commands import ROOT, Done, record_of, run, run_folders

CONSOLE = "import sys\nfrom wellfed.__main__ import run\nif __name__ == '__main__':\n    sys.exit(run())\n"
"""What an installer writes as ``.venv/bin/wellfed``."""
QUICK = ("logger=none", "trainer.max_steps=5", "telemetry.ceiling_steps=2")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """With blanks and other letters in its path, and one package, which its default workload names."""
    folder = tmp_path / "meine Netze é"
    shutil.copytree(ROOT / "configs", folder / "configs")
    shutil.copytree(ROOT / "src" / "wellfed" / "cli" / "blank", folder / "src" / "mine")
    primary = folder / "configs" / "train.yaml"
    primary.write_text(primary.read_text().replace("workload: recsys", "workload: mine"))
    option = (folder / "src" / "mine" / "workload.yaml").read_text()
    (folder / "configs" / "workload" / "mine.yaml").write_text(
        option.replace("wellfed.cli.blank", "mine").replace("blank", "mine")
    )
    for file in (folder / "src" / "mine").glob("*.py"):
        file.write_text(file.read_text().replace("wellfed.cli.blank", "mine"))
    (folder / "below").mkdir()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "wellfed").write_text(CONSOLE)
    return folder


def wellfed(project: Path, *words: str) -> Done:
    return run(project.parent / "bin" / "wellfed", *words, cwd=project / "below", fresh=True, WELLFED_PROJECT="")


@pytest.mark.slow
def test_ranks_and_worker_processes_find_the_projects_packages(project: Path) -> None:
    loader = ("loader.backend=processes", "loader.num_workers=1")
    ranks = ("trainer.devices=2", "trainer.accelerator=cpu", "trainer.max_time_s=300")
    done = wellfed(project, "train", *QUICK, *loader, *ranks)
    assert done.code == 0, done.text
    (folder,) = run_folders(project / "below", "mine")
    record = record_of(folder)
    assert (record["status"], record["plan"]["trainer.devices"]["value"]) == ("ok", 2)
    assert record["config"]["trainer"]["max_time_s"] == 300.0
    again = wellfed(project, "train", "rerun=last", "trainer.devices=1", "loader=auto", *QUICK)
    assert again.code == 0, again.text
    assert f"Taking the newest run: logs/mine/runs/{folder.name}" in again.err
    evaluated = wellfed(project, "evaluate", "accelerator=cpu")
    assert evaluated.code == 0, evaluated.text
    assert "test/accuracy" in evaluated.out
    assert (run_folders(project / "below", "mine")[-1] / "evaluation.json").exists()


@pytest.mark.slow
def test_what_is_typed_next_is_shown_as_it_was_typed(project: Path) -> None:
    swept = wellfed(
        project, "sweep", "sweep.trial_steps=10", "hydra.sweeper.params=null", "loader=baseline,balanced", *QUICK[:1]
    )
    assert swept.code == 0, swept.text
    assert "Keep the fastest: wellfed choose logs/mine/sweeps/throughput --name mine" in swept.out
    chosen = wellfed(project, "choose", "--name", "mine")
    assert chosen.code == 0, chosen.text
    assert "Taking the newest sweep: logs/mine/sweeps/throughput" in chosen.err
    assert "Use it: wellfed train experiment=mine" in chosen.out
