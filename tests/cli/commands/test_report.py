"""``python -m wellfed report``: the reports of a run again, and two runs side by side, from files alone."""

from pathlib import Path
from typing import Any

import pytest

from tests.kit.evidence_of import evidence
from tests.test_record import dead_pid
from wellfed.cli import main as cli
from wellfed.cli.commands import report
from wellfed.cli.output import Answer
from wellfed.explain.report.comparison import Comparison
from wellfed.record.entries import RunRecord

A, B = "2026-01-01_00-00-00_aaaa", "2026-01-02_00-00-00_bbbb"


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two runs of one workload, the newer of which waits for its data."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "logs" / "recsys" / "runs"
    for name, wait_ms in {A: 0.0, B: 30.0}.items():
        (folder / name).mkdir(parents=True)
        evidence(wait_ms=wait_ms, plan={"loader.num_workers": 1}).record.write(folder / name)
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_both_reports_of_the_newest_run_are_written_beside_its_record(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (runs / B / "run.json").read_bytes()
    assert cli.main(["report"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("ok: 100 steps")
    assert f"Written: logs/recsys/runs/{B}/report.md, logs/recsys/runs/{B}/report.html" in out
    assert names(runs / B) == ["report.html", "report.md", "run.json"]
    assert "unexplained" in (runs / B / "report.html").read_text()
    assert "unexplained" in (runs / B / "report.md").read_text()
    assert (runs / B / "run.json").read_bytes() == before
    assert names(runs / A) == ["run.json"]


def test_two_runs_are_shown_side_by_side(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", A, str(runs / B)]) == 0
    out = capsys.readouterr().out
    assert "A trains 4.0 times as fast as B (95 % interval 3.9 to 4.1)." in out
    assert "wait (" in out or "wait  " in out
    assert "B: unexplained" in out
    page = runs.parents[1] / f"comparison_{A}_{B}.html"
    assert f"Written: logs/{page.name}" in out
    assert "A trains 4.0 times as fast as B" in page.read_text()
    assert names(runs / A) == names(runs / B) == ["run.json"]


def test_they_are_written_elsewhere_when_asked(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", A, "--out", "new/folder"]) == 0
    assert cli.main(["report", A, B, "--out", "new/folder"]) == 0
    assert names(Path("new/folder")) == [f"comparison_{A}_{B}.html", "report.html", "report.md"]
    assert names(runs / A) == ["run.json"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((A, B, A), "are 3 runs, and a page shows two. Name two."),
        ((A, "--out", "page.html"), "--out page.html: is the name of a file; the pages have theirs. Name a folder."),
        ((A, A), "is the same run. Name another one to compare it with."),
        ((A, "2026-01-02_00-00-00_bbbc"), "There are: logs/recsys/runs/2026-01-02_00-00-00_bbbb, "),
        (
            (A, "--out", "file/under"),
            "can't be written to: Not a directory. Make room there, or write elsewhere: --out FOLDER.",
        ),
    ],
)
def test_what_cannot_be_done_is_told_with_the_way_out(
    runs: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], told: str
) -> None:
    Path("file").write_text("")
    assert cli.main(["report", *words]) == 2
    assert told in capsys.readouterr().err


def test_a_run_that_still_runs_and_one_that_was_killed_have_reports_that_say_so(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = RunRecord.start(A)
    for pid, told in ((record.pid, f"It still runs (process {record.pid} on "), (dead_pid(), "Its process is gone")):
        record.pid = pid
        record.write(runs / A)
        assert cli.main(["report", A]) == 0
        assert told in capsys.readouterr().out
        assert told in " ".join((runs / A / "report.html").read_text().split())
        assert told in (runs / A / "report.md").read_text()


@pytest.mark.parametrize("text", ['{"schema": 2, "run_id"', '{"schema": 1, "run_id": "x", "status": "ok"}'])
def test_a_damaged_record_is_told(runs: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    (runs / A / "run.json").write_text(text)
    for words in (["report", A], ["report", A, B], ["diagnose", A]):
        assert cli.main(words) == 2
        error = capsys.readouterr().err
        assert "can't be read: " in error
        assert "has schema 1; this version of wellfed reads schema 2." in error or "is damaged" in error


@pytest.mark.parametrize(
    ("words", "code", "verdict"),
    [
        ((A, B, "--max-slower", "5%"), 1, "Slower: B takes 297.0 % more time a sample than A (95 % interval +286"),
        (
            (B, A, "--max-slower", "5%"),
            0,
            "Within the limit of 5 %: B takes 74.8 % less time a sample than A (95 % interval -75.5 %",
        ),
        ((A, B, "--max-slower", "400 %"), 0, "Within the limit of 400 %: "),
        ((A, B, "--max-slower", "297%"), 0, "Not told apart: B takes 297.0 % more time a sample than A"),
    ],
)
def test_a_slower_run_ends_it_with_one(
    runs: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], code: int, verdict: str
) -> None:
    assert cli.main(["report", *words]) == code
    out, err = capsys.readouterr()
    assert verdict in out.splitlines()[-1]
    assert err == ""


def test_runs_that_can_not_be_compared_have_no_verdict(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, workload, pinned in ((A, "recsys", False), (B, "speech", True)):
        record = evidence(config={"loader": {"pin_memory": pinned}, "gpu": {"tf32": pinned}}).record
        record.workload = workload
        record.write(runs / name)
    assert cli.main(["report", A, B, "--max-slower", "5%"]) == 2
    out, err = capsys.readouterr()
    assert "Written: " in out
    assert "Slower" not in out
    assert err.startswith("No verdict: these runs can't be compared.\n  - workload: Different workloads,")
    assert "  - settings: differ: loader.pin_memory, gpu.tf32. Run both with the same settings." in err


def test_a_run_that_others_disturbed_has_no_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    found: Any = {"id": "busy_machine", "severity": "high", "message": "Others.", "evidence": {}}
    both = Comparison(evidence(), evidence(wait_ms=30.0, findings=[found]))
    assert report._guarded(Answer(), both, 0.05) == 2
    assert "B: has busy_machine. Others. Run both again." in capsys.readouterr().err


def test_a_limit_needs_two_runs(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", A, "--max-slower", "5%"]) == 2
    assert "--max-slower: compares runs, and one is named at most. Name the reference first" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["0.05", "-5%", "nan%"])
def test_a_limit_is_a_percentage(runs: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["report", A, B, f"--max-slower={text}"])
    assert ended.value.code == 2
    assert f"{text}: must be a percentage from 0% on, with its sign: 5%" in capsys.readouterr().err
