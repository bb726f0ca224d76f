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
        record = json.loads((place / "run.json").read_text())
        record["time"].setdefault("step_ms_mean", record["time"]["step_ms_p50"])  # younger than the recorded runs
        (place / "run.json").write_text(json.dumps(record))
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


TYPICAL = [
    "\x1b]0;title\x07",
    "\x9b2J",
    "a\r\nb\x00",
    "[bold]:smile:",
    "\u202e|`<b>",
    "\x1b[31m<script>alert(1)</script>",
]


def with_texts(value: Any, draw: Callable[[], str]) -> Any:
    """The tree with another text in the place of each, but for a number that is written as one."""
    if isinstance(value, str):
        return draw()
    if isinstance(value, list):
        return [with_texts(item, draw) for item in value]
    if isinstance(value, dict):
        return {key: item if key == "capability" else with_texts(item, draw) for key, item in value.items()}
    return value


def test_a_text_that_a_terminal_or_a_browser_would_obey_is_written_out(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    number = count()
    recorded = json.loads((run / "run.json").read_text())
    found = with_texts(recorded, lambda: TYPICAL[next(number) % len(TYPICAL)])
    for name in ("metrics", "plan", "config", "phases"):
        found[name] = {f"{TYPICAL[place % len(TYPICAL)]}{place}": of for place, of in enumerate(found[name].values())}
    found |= {name: recorded[name] for name in ("status", "started_at")}
    found["error"] = dict.fromkeys(("kind", "message", "advice"), TYPICAL[-1])
    (run / "run.json").write_text(json.dumps(found))
    for words in (*COMMANDS, ["diagnose", RUN, "--json"], ["runs", "--json"]):
        assert cli.main(words) == 0, words
        captured = capsys.readouterr()
        assert not OBEYED.search(captured.out + captured.err), words
    for page in [*run.glob("report.*"), *Path("logs").glob("*.html")]:
        text = page.read_text()
        assert not OBEYED.search(text), page
        assert "<script>alert" not in text
