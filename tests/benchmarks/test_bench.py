"""What `benchmarks/bench.py` makes of its themes, and the page that shows the newest record."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from datetime import UTC, datetime
from pathlib import Path

import pytest

from benchmarks import bench, measuring


@pytest.fixture
def theme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs a script as the only theme."""

    def run(body: str, *words: str, limit_s: float = 60.0) -> dict:
        script = tmp_path / "theme.py"
        script.write_text("import sys, time\nfrom pathlib import Path\nfrom benchmarks import measuring\n" + body)
        monkeypatch.setattr(bench, "THEMES", {"made": [str(script), *words]})
        return bench.run("made", 3, limit_s)

    return run


FINISHES = textwrap.dedent("""
    rows = measuring.compared("reading", "rows/s", [4.0, 4.4, 4.2], {"a peer": [2.0, 2.1, 2.2], "another": None})
    rows += measuring.counted("calls", 8, {"a third": 12})
    measuring.finish("made", [], "said", Path(sys.argv[sys.argv.index("--out") + 1]), config={}, compared=rows)
""")


def test_the_page_shows_the_newest_record() -> None:
    text = bench.PAGE.read_text(encoding="utf-8")
    assert bench.page(text, bench.newest()) == text, "python benchmarks/bench.py --page"
    themes = json.loads(bench.newest().read_text())["themes"]
    assert {theme["theme"] for theme in themes} >= set(bench.THEMES)


def test_a_record_that_lacks_a_theme_makes_no_page(tmp_path: Path) -> None:
    record = json.loads(bench.newest().read_text())
    record["themes"] = [theme for theme in record["themes"] if theme["theme"] != "loop"]
    rump = tmp_path / "rump.json"
    rump.write_text(json.dumps(record))
    with pytest.raises(SystemExit, match="lacks loop"):
        bench.page(bench.PAGE.read_text(encoding="utf-8"), rump)


@pytest.mark.parametrize("left_out", [[], ["other"]])
def test_a_record_is_replaced_by_one_of_all_themes_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left_out: list[str]
) -> None:
    records = tmp_path / "benchmarks" / "records"
    records.mkdir(parents=True)
    before = records / f"{datetime.now(UTC):%Y-%m-%d}_bench_cpu.json"
    before.write_text("{}")
    script = tmp_path / "theme.py"
    script.write_text("import sys\nfrom pathlib import Path\nfrom benchmarks import measuring\n" + FINISHES)
    monkeypatch.setattr(bench, "THEMES", {"made": [str(script)], **{name: [str(script)] for name in left_out}})
    monkeypatch.setattr(bench, "DONE", tmp_path / "build" / "bench.json")
    monkeypatch.setattr(bench, "RECORDS", records)
    monkeypatch.setattr(sys, "argv", ["bench.py", "--only", "made"])
    bench.main()
    assert (before.read_text() == "{}") == bool(left_out)
    assert (tmp_path / "build" / "bench.json").exists() == bool(left_out)


def test_every_theme_has_its_script() -> None:
    assert all((bench.ROOT / "benchmarks" / script).is_file() for script, *_ in bench.THEMES.values())


def test_a_theme_gives_a_row_for_each_peer(theme, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "BUSY_FRAC", 9.0)
    found = theme(FINISHES, "--rounds", "{rounds}")
    installed, missing, counted = found["rows"]
    assert (installed["theme"], installed["ours"], installed["theirs"]) == ("made", 4.2, 2.1)
    assert installed["verdict"] == "better"
    assert missing["verdict"] == "not installed"
    assert bench.table([missing])[-1] == "| reading, rows/s | 4.2 | another |  | not installed |"
    assert bench.table([counted])[-1] == "| calls | 8 | a third | 12 | 1.5 (counted) |"


@pytest.mark.slow
def test_on_a_busy_machine_only_counts_have_a_verdict(theme) -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
        found = theme("time.sleep(1)\n" + FINISHES)
        other.kill()
    assert found["theme"]["others_frac"] > bench.BUSY_FRAC
    assert [row["verdict"] for row in found["rows"]] == ["busy", "not installed", "counted"]
    assert "4.2 | a peer | 2.1 | machine busy: no verdict |" in bench.table(found["rows"])[2]


@pytest.mark.slow
def test_a_theme_that_fails_is_a_row_and_leaves_nothing_behind(theme, capsys) -> None:
    found = theme("import subprocess\nsubprocess.Popen(['sleep', '987'])\nsys.exit('no disk')")
    assert [row["verdict"] for row in found["rows"]] == ["failed: exit code 1"]
    assert "no disk" in capsys.readouterr().err
    assert subprocess.run(["pgrep", "-f", "sleep 987"], capture_output=True, check=False).returncode == 1
    assert theme("time.sleep(60)", limit_s=1.0)["rows"][0]["verdict"] == "failed: not done after 1 s"


@pytest.mark.parametrize(
    ("ours", "theirs", "less", "verdict"),
    [
        ([10.0, 11.0, 10.5], [5.0, 5.2, 5.1], False, "better"),
        ([10.0, 11.0, 10.5], [5.0, 5.2, 5.1], True, "worse"),
        ([1.0, 2.0, 1.5], [1.5, 1.4, 1.6], True, "level"),
        ([1.0], [9.0], True, "level"),
    ],
)
def test_a_verdict_needs_an_interval_without_1(ours, theirs, less, verdict) -> None:
    (row,) = measuring.compared("x", "s", ours, {"peer": theirs}, less_is_better=less)
    assert row["verdict"] == verdict
    assert (row["times"] > 1) == (verdict == "better") or verdict == "level"


def test_a_record_names_no_place_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "record.json"
    words = ["--folder", "/home/me", "--rounds", "3", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["benchmarks/made.py", *words])
    measuring.finish("made", [], "said", out, config={}, machine={"cpu": "another"})
    record = json.loads(out.read_text())
    assert record["command"] == "python benchmarks/made.py --rounds 3"
    assert record["machine"] == {"cpu": "another", "versions": {}}
