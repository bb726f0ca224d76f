"""Each command that reads run folders against each kind of damage, and against texts that a terminal would obey."""

import gzip
import json
import re
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from wellfed.cli import main as cli
from wellfed.record.entries import RunRecord

TRACES = Path(__file__).parents[1] / "traces"
RUN, OTHER = "2026-01-02_00-00-00_bbbb", "2026-01-01_00-00-00_aaaa"
COMMANDS = (["diagnose", RUN], ["report", RUN], ["report", OTHER, RUN], ["runs"])
TABLES = ("steps.csv", "telemetry.csv", "metrics.csv")
OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def lay_out(folder: Path) -> Path:
    """Two runs on the simulated card, as they were recorded; the folder of the newer one."""
    for run, trace in ((OTHER, "starved_card_pictures"), (RUN, "pauses_of_its_own_pictures")):
        place = folder / "logs" / "pictures" / "runs" / run
        place.mkdir(parents=True)
        text = gzip.decompress((TRACES / "simulated" / f"{trace}.json.gz").read_bytes())
        for name, content in json.loads(text)["files"].items():
            (place / name).write_text(content)
    return place


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return lay_out(tmp_path)


def cut(path: Path) -> None:
    """Cuts the file, as a killed process does."""
    content = path.read_bytes()
    path.write_bytes(content[: -len(content.splitlines()[-1]) // 2])


def no_text(path: Path) -> None:
    path.write_bytes(b"\xff\xfe\x00\x1b[31m,\n\x00,\x00\n" * 50)


@pytest.mark.parametrize("damage", [cut, no_text, Path.unlink])
def test_tables_that_are_damaged_or_missing_are_done_without(
    run: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], None]
) -> None:
    for name in TABLES:
        if (run / name).exists():
            damage(run / name)
    for words in COMMANDS:
        assert cli.main(words) == 0, words
        captured = capsys.readouterr()
        assert captured.err == ""
        assert RUN in captured.out or words[0] == "report"
        assert not OBEYED.search(captured.out)


def cut_record(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def newer_schema(path: Path) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema": 2}))


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (cut_record, "is damaged: "),
        (newer_schema, "has schema 2; this version of wellfed reads schema 1."),
    ],
)
def test_a_record_that_cannot_be_read_is_told(
    run: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], None], told: str
) -> None:
    damage(run / "run.json")
    for words in COMMANDS:
        named = [str(run) if word == RUN else word for word in words]
        code = cli.main(named)
        captured = capsys.readouterr()
        assert code == (0 if words == ["runs"] else 2)
        assert re.search(told, captured.out + captured.err), named
        assert "Traceback" not in captured.err


def test_a_run_that_is_only_just_begun_has_pages(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in TABLES:
        (run / name).unlink(missing_ok=True)
    RunRecord.start(RUN).write(run)
    for words in COMMANDS:
        assert cli.main(words) == 0, words
        out = capsys.readouterr().out
        assert "running" in out or "still runs" in out


TYPICAL = ["\x1b]0;title\x07", "\x9b2J", "a\r\nb\x00", "[bold]:smile:", "\u202e|`<b>"]


def with_texts(value: Any, draw: Callable[[], str]) -> Any:
    """The tree with another text in the place of each, but for a number that is written as one."""
    if isinstance(value, str):
        return draw()
    if isinstance(value, list):
        return [with_texts(item, draw) for item in value]
    if isinstance(value, dict):
        return {key: item if key == "capability" else with_texts(item, draw) for key, item in value.items()}
    return value


def hold(run: Path, texts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """With these texts in its record, no command prints or writes what a terminal or a browser would obey."""
    texts = [*texts, "\x1b[31m<script>alert(1)</script>"]
    whole, number = (run / "run.json").read_text(), count()
    found = with_texts(json.loads(whole), lambda: texts[next(number) % len(texts)])
    for name in ("metrics", "plan", "config", "phases"):
        found[name] = {f"{texts[place % len(texts)]}{place}": of for place, of in enumerate(found[name].values())}
    found["status"] = json.loads(whole)["status"]  # another is no record's
    found["events"] = [{"kind": texts[0], "step": 1, texts[1]: texts[2]}]
    found["metrics"] |= {f"val/{texts[-1]}": 1.0}
    found["error"] = dict.fromkeys(("kind", "message", "advice"), texts[-1])
    (run / "run.json").write_text(json.dumps(found))
    for words in (*COMMANDS, ["diagnose", RUN, "--json"], ["runs", "--json"]):
        assert cli.main(words) == 0, words
        captured = capsys.readouterr()
        assert not OBEYED.search(captured.out + captured.err), words
    for page in [*run.glob("report.*"), *Path("logs").glob("*.html")]:
        text = page.read_text()
        assert not OBEYED.search(text), page
        assert "<script>alert" not in text
    (run / "run.json").write_text(whole)


def test_a_text_that_a_terminal_or_a_browser_would_obey_is_written_out(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hold(run, TYPICAL, capsys)


def test_names_of_folders_are_texts_too(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = run.rename(run.with_name("2026-01-03\x1b[31m<script>"))
    for words in (["diagnose"], ["report"], ["report", str(evil), OTHER], ["runs"], ["diagnose", "\x1b[31m"]):
        assert cli.main(words) == (2 if "\x1b[31m" in words else 0)
        captured = capsys.readouterr()
        assert "\\x1b[31m" in captured.out + captured.err
        assert not OBEYED.search(captured.out + captured.err), words
    (page,) = Path("logs").glob("*.html")
    assert "[31m<script>" not in page.read_text()
