"""What a user of a base install sees: runs, reports and boards work, and a missing package is one message.

Packages of extras are hidden from a run that is real in all else.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.end_to_end.commands import ROOT, Done, only_folder, record_of, run
from wellfed.extras import PACKAGES

SMALL = ("logger=none", "workload.data.num_series=4", "workload.data.num_days=300", "trainer.max_steps=30")


def run_without(packages: list[str], script: str, *arguments: str, cwd: Path) -> Done:
    """Runs an entry script, or ``python -m wellfed``, where these packages can't be imported."""
    hiding = cwd / "hiding.py"
    hiding.write_text(
        "import runpy, sys\n"
        "import lightning.pytorch\n"  # torchmetrics imports what pip has installed of them, hidden or not
        f"hidden = {packages}\n"
        "for name in [*hidden, *sys.modules]:\n"
        "    if name.partition('.')[0] in hidden:\n"
        "        sys.modules[name] = None\n"
        f"sys.argv[0] = {str(ROOT / 'src' / script)!r}\n"
        "sys.path[0] = sys.argv[0].rpartition('/')[0]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    return run(hiding, *arguments, cwd=cwd)


def wellfed_without(packages: list[str], *arguments: str, cwd: Path) -> Done:
    return run_without(packages, "wellfed/__main__.py", *arguments, cwd=cwd)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Done]:
    """A run for which no package of an extra is there."""
    cwd = tmp_path_factory.mktemp("base")
    return cwd, run_without(list(PACKAGES), "train.py", "workload=forecast", *SMALL, cwd=cwd)


@pytest.mark.slow
def test_a_run_ends_well_and_its_page_has_pictures(trained: tuple[Path, Done]):
    cwd, done = trained
    assert done.code == 0, done.text
    assert not [word for word in ("Traceback", "WARNING", "could not") if word in done.text], done.text
    folder = only_folder(cwd, "forecast")
    assert "uPlot" in (folder / "report.html").read_text(encoding="utf-8")
    assert record_of(folder)["status"] == "ok"


@pytest.mark.slow
def test_the_report_is_written_again_elsewhere(trained: tuple[Path, Done]):
    cwd, _ = trained
    folder = only_folder(cwd, "forecast")
    page, words = (folder / "report.html").read_bytes(), (folder / "report.md").read_bytes()
    done = wellfed_without(list(PACKAGES), "report", str(folder), cwd=cwd)
    assert (done.code, "Traceback" in done.text) == (0, False), done.text
    assert (folder / "report.html").read_bytes() == page
    assert (folder / "report.md").read_bytes() == words
    told = wellfed_without(list(PACKAGES), "runs", "--json", cwd=cwd)
    assert told.code == 0, told.text
    assert json.loads(told.out)


def series(folder: Path) -> None:
    days = np.arange("2024-01-01", "2024-04-10", dtype="M8[D]")
    (folder / "rows.csv").write_text("date,sales\n" + "".join(f"{day},{place}\n" for place, day in enumerate(days)))


CASES = {
    "recsys": ("transformers", ["workload=recsys", "workload.data.scale=0.02"], None),
    "forecast, a table": ("pandas", ["workload=forecast", "workload.data.path=rows.csv"], series),
    "restoration": ("PIL", ["workload=restoration"], None),
}


@pytest.mark.slow  # tests/test_extras.py, tests/config/faults
@pytest.mark.parametrize("case", CASES)
def test_a_missing_package_is_one_message_and_nothing_is_run(case: str, tmp_path: Path):
    package, arguments, made = CASES[case]
    if made is not None:
        made(tmp_path)
    done = run_without([package], "train.py", *arguments, "logger=none", "trainer.max_steps=2", cwd=tmp_path)
    assert done.code == 2, done.text
    assert "Traceback" not in done.text
    (message,) = [line for line in done.err.splitlines() if "wellfed[" in line]
    extra, _ = PACKAGES[package]
    assert message.count("Install it") == 1
    assert message.endswith(f"Install it: python -m pip install 'wellfed[{extra}]'.")
    assert package in message
    assert not list(tmp_path.glob("logs/*/runs/*"))
