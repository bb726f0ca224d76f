"""Damaged and hostile run.json files, ledgers and tables: every reader answers, or raises an error of the project's."""

import copy
import json
import random
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kit import made
from tests.kit.made_run import made_run
from wellfed.cli import main as cli
from wellfed.errors import ConfigError
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.run_rules import conclude
from wellfed.explain.report.comparison import Comparison
from wellfed.explain.report.run_digest import digest, runs_table
from wellfed.explain.report.run_lines import sections
from wellfed.explain.report.run_page import to_html
from wellfed.explain.report.write import to_markdown
from wellfed.observe.loggers.journal import MOST_OF_A_KIND, Journal
from wellfed.record import FILE_NAME, RunRecord
from wellfed.run.folder.resume import find_latest
from wellfed.study import ledger
from wellfed.study.board.files import to_csv
from wellfed.study.board.files import to_markdown as board_markdown
from wellfed.study.ranking.ranking import leaderboard
from wellfed.study.study_files import load

HOSTILE = [
    *(None, "", "x", "=1+1", -1, 0, True, 3.5, 1e308, 10**30, float("nan"), float("inf")),
    *([], {}, [None], ["x"], {"a": 1}, [[[[]]]], "9" * 400, "\x00\ud800"),
]
FINDING = {
    **{"id": "too_few_workers", "severity": "high", "message": "m", "evidence": {"wait_frac": 0.3}, "text": "t"},
    **{"change": ["loader.num_workers=2"], "changes_learning": False, "gain": {"factor": 1.3, "low": 1.1, "high": 1.5}},
}
WHOLE: dict[str, Any] = {
    "throughput": {
        **{"samples_per_s": 40960.0, "ci95": [40000.0, 42000.0], "steps": 57, "warmup_steps": 3, "sample_unit": "users"}
    },
    "ceiling": {"samples_per_s": 81920.0},
    "readiness_frac": 0.25,
    "time": {
        **{"wait_frac": 0.5, "copy_frac": 0.1, "compute_frac": 0.4, "host_frac": 0.0, "step_ms_mean": 83.2},
        **{"step_ms_p50": 50.0, "step_ms_p95": 61.0, "launch_ms_p50": 3.0},
    },
    "findings": [FINDING],
    "swing": {"period_s": 9.5, "period_steps": 10, "cause": "epoch", "r2": 0.9},
    "loading": {
        **{"build_ms_mean": 10.0, "build_ms_p50": 9.0, "build_ms_p99": 20.0, "cpu_frac": 0.5, "batch_mib": 1.0},
        **{"has_fetch": True, "most_workers": 3},
        "longest_wait": {"rank": 1, "node": 0, "wait_frac": 0.4, "readiness_frac": 0.5},
    },
    "ranks": [
        {
            **{"rank": rank, "node": 0, "gpu": "0", "wait_frac": 0.4, "copy_frac": None, "compute_frac": 0.6},
            **{"host_frac": 0.0, "step_ms_mean": 50.0, "readiness_frac": 0.5, "peak_gib": None},
        }
        for rank in range(2)
    ],
    "synchronisations": [{"place": "a.py:3", "per_step": 1.0}],
    "host": {"cpu_pct": 150.0, "rss_gib": 2.0, "shm_gib": 1.0},
    "phases": {"train": {"total_s": 10.0, "times": 1}},
    "before_training": {"imports_s": 1.0, "data_s": 1.0, "plan_s": 1.0},
    "profile": {
        **{"steps": 3, "by": "device", "step_ms": 50.0, "device_busy_frac": 0.5, "copy_ms_per_step": 1.0},
        **{"copy_under_compute_frac": 0.5, "host_ahead_frac": 0.5},
        "operations": [{"name": "mm", "calls": 3, "ms_per_step": 3.0, "share_frac": 0.5}],
    },
    "telemetry": {"interval_s": 0.5, "cpu_frac": 0.01},
    "git": {"commit": "abc", "dirty": True, "diff": "+x"},
    "error": {"kind": "code", "message": "m", "advice": "a"},
    "wandb": {"id": "x", "mode": "offline", "path": "p", "parts": ["p"]},
    "config": {
        "loader": {"num_workers": 3},
        "trainer": {
            "best_metric": "loss",
            "checkpoint_every_steps": 10,
            "checkpoint_minutes": 10,
            "log_every_steps": 10,
        },
        **{"workload": {"effective_batch_size": 64}, "memory": {"micro_batch": 64}, "seed": 1},
    },
    "overrides": ["seed=1"],
    "events": [
        {"kind": "nan", "step": 2, "time_s": 0.1, "left_out": 3},
        {"kind": "resume", "step": 10, "time_s": 0.5},
        {"kind": "checkpoint", "step": 20, "time_s": 1.0, "file": "last.ckpt"},
    ],
    "artifacts": {"report": "report.md"},
}
GPUS = {
    "0": {
        **{
            "util_pct": {"mean": 47.4, "p5": 9.0, "p95": 90.0, "max": 91.0},
            "mem_used_gib": {"mean": 12.3, "max": 13.0},
        },
        **{"power_w": {"mean": 312.0}, "energy_j": 34120.0, "energy_per_sample_j": 0.0139},
    }
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("logs") / "recsys" / "runs" / "whole"
    folder.mkdir(parents=True)
    found = made_run(folder, steps=60, **WHOLE)
    found.gpus = GPUS
    found.write(folder)
    return folder


@cache
def whole(folder: Path) -> tuple[dict[str, Any], Evidence, list[tuple[Any, ...]]]:
    entries = json.loads((folder / FILE_NAME).read_text())
    return entries, Evidence.read(folder), [*places(entries)]


def places(tree: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of all parts of a tree, itself among them."""
    yield place
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield from places(value, (*place, key))


def put(tree: Any, place: tuple[Any, ...], value: Any) -> Any:
    if not place:
        return value
    made_, node = copy.deepcopy(tree), None
    node = made_
    for key in place[:-1]:
        node = node[key]
    node[place[-1]] = value
    return made_


def refusal(call: Callable[[], object]) -> str | None:
    """What a reader raises as an error of its own; None: it answers."""
    try:
        call()
    except (ValueError, ConfigError) as error:
        return str(error)
    return None


def read_all(folder: Path, other: Evidence) -> Evidence:
    """What `runs`, `diagnose`, `report` and a comparison do with a run."""
    found = RunRecord.read(folder)
    list(runs_table([digest(folder, found)], datetime.now(UTC), 80).lines(80))
    evidence = Evidence.of(found, folder)
    conclude(evidence)
    assert [list(section.lines) for section in sections(evidence.record)]
    assert to_markdown(evidence.record, evidence.first_metrics)
    both = Comparison(other, evidence)
    assert both.verdict
    for told in (both.caveats, both.figures, both.metrics, both.plan, both.settings):
        assert all(str(one) for one in told)
    return evidence


@given(st.data())
@settings(max_examples=120, derandomize=True, deadline=None)
def test_a_hostile_value_anywhere_in_a_record_is_read_or_refused(run: Path, data: st.DataObject) -> None:
    entries, evidence, everywhere = whole(run)
    damaged = entries
    for _ in range(data.draw(st.integers(1, 3))):
        try:
            damaged = put(damaged, data.draw(st.sampled_from(everywhere)), data.draw(st.sampled_from(HOSTILE)))
        except (KeyError, IndexError, TypeError):  # within what is gone by now
            continue
    text = json.dumps(damaged).encode(errors="surrogatepass")
    (run / FILE_NAME).write_bytes(text[: data.draw(st.sampled_from([len(text), len(text), len(text) // 2]))])
    told = refusal(lambda: read_all(run, evidence))
    assert told is None or "run record" in told or "schema" in told


@pytest.mark.slow
def test_each_part_of_a_record_with_each_hostile_value(run: Path) -> None:
    entries, evidence, everywhere = whole(run)
    for place in everywhere:
        for value in HOSTILE:
            (run / FILE_NAME).write_bytes(json.dumps(put(entries, place, value)).encode(errors="surrogatepass"))
            told = refusal(lambda: read_all(run, evidence))
            assert told is None or "run record" in told or "schema" in told, (place, value)
            if told is None and random.Random(str(place)).random() < 0.03:
                assert to_html(read_all(run, evidence), run)


@pytest.mark.parametrize("text", ["[" * 100_000, "{}", "[]", "null", "1", "", "\x00" * 99, '{"schema": 1}'])
def test_what_is_no_record_at_all_hides_no_other_run(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    good, bad = (tmp_path / "logs" / "recsys" / "runs" / name for name in ("good", "bad"))
    for folder in (good, bad):
        folder.mkdir(parents=True)
    made_run(good, steps=10)
    (bad / FILE_NAME).write_text(text)
    assert cli.main(["runs", "--log-dir", str(tmp_path / "logs")]) == 0
    out = capsys.readouterr().out
    assert "good" in out
    assert "damaged" in out
    assert cli.main(["diagnose", str(bad)]) == 2
    assert "can't be read" in capsys.readouterr().err


def test_a_record_of_a_size_that_no_run_writes_is_refused(tmp_path: Path) -> None:
    RunRecord.start("x").write(tmp_path)
    with (tmp_path / FILE_NAME).open("a") as stream:
        stream.truncate(40 * 2**20)
    with pytest.raises(ValueError, match=r"it has 40 MiB, and such a file at most 32\.$"):
        RunRecord.read(tmp_path)


def test_events_of_a_kind_are_bounded_and_what_is_left_out_is_counted(tmp_path: Path) -> None:
    journal = Journal(RunRecord.start("x"), tmp_path)
    journal.event("resume")
    for step in range(3 * MOST_OF_A_KIND):
        journal.event("sample_skipped", step=step, message="x" * (20_000 if step == 0 else 20))
    events = journal.record.events
    skipped = [event for event in events if event["kind"] == "sample_skipped"]
    assert len(skipped) == MOST_OF_A_KIND
    assert [event["kind"] for event in events].count("resume") == 1
    assert (skipped[0]["step"], skipped[-1]["step"]) == (0, 3 * MOST_OF_A_KIND - 1)
    assert sum(event.get("left_out", 0) for event in skipped) == 2 * MOST_OF_A_KIND
    journal.save()
    assert (tmp_path / FILE_NAME).stat().st_size < 2e5


def test_a_damaged_run_is_passed_over_where_the_latest_is_looked_for(run: Path, tmp_path: Path) -> None:
    from wellfed.config.compose import compose

    folder = tmp_path / "logs" / "recsys" / "runs" / "2026-01-01_00-00-00_aaaa"
    folder.mkdir(parents=True)
    (folder / FILE_NAME).write_text("[" * 100_000)
    assert find_latest(compose([f"paths.log_dir={tmp_path / 'logs'}"]).config) == (None, [])


# -- sweeps -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.write(tmp_path_factory.mktemp("sweeps") / "quick")


def shown(folder: Path) -> None:
    board = leaderboard(*load(folder))
    assert to_csv(board)
    assert board_markdown(board)
    assert board.to_dict()


@cache
def rows_of(folder: Path) -> tuple[str, ...]:
    return tuple((folder / ledger.FILE_NAME).read_text().splitlines())


@given(st.data())
@settings(max_examples=25, derandomize=True, deadline=None)
def test_hostile_rows_of_a_ledger_are_left_out_or_shown(sweep: Path, data: st.DataObject) -> None:
    rows = list(rows_of(sweep))
    for _ in range(3):
        number = data.draw(st.integers(0, len(rows) - 1))
        entries = json.loads(rows_of(sweep)[number])
        place = data.draw(st.sampled_from([*places(entries)]))
        rows[number] = json.dumps(put(entries, place, data.draw(st.sampled_from(HOSTILE))))
    (sweep / ledger.FILE_NAME).write_bytes("\n".join(rows).encode(errors="surrogatepass"))
    shown(sweep)


@given(st.data())
@settings(max_examples=25, derandomize=True, deadline=None)
def test_a_hostile_sweep_file_is_refused_or_shown(sweep: Path, data: st.DataObject) -> None:
    path = sweep / "sweep.json"
    before = path.read_text()
    entries = json.loads(before)
    place = data.draw(st.sampled_from([*places(entries)]))
    damaged = put(entries, place, data.draw(st.sampled_from(HOSTILE)))
    path.write_bytes(json.dumps(damaged).encode(errors="surrogatepass"))
    told = refusal(lambda: shown(sweep))
    path.write_text(before)
    assert told is None or "can't be read" in told


def test_a_deep_line_and_a_long_one_are_no_rows(sweep: Path) -> None:
    (sweep / ledger.FILE_NAME).write_text("[" * 100_000 + "\n" + '{"point": "' + "x" * 2**21 + '"}\n')
    found = ledger.read(sweep)
    assert (found.rows, found.damaged) == ((), (1, 2))
