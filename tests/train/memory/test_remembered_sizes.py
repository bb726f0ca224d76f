"""What a run had to lower, written and read: nothing that lies in the file can end a run."""

import datetime
import importlib
import json
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.kit.meeting import together
from wellfed.train.memory import remembered_sizes
from wellfed.train.memory.remembered_sizes import FOREACH, MICRO_BATCH, Lowered, file_for, from_event, recall, remember

FOUR = Lowered(4, 8, "2026-11-22", "2026-11-22_10-00-00")
ONE_BY_ONE = Lowered(False, None, "2026-11-22", "2026-11-22_10-00-00")


@pytest.fixture
def file(tmp_path):
    return file_for(tmp_path / "cache", "0123", "a card", "7.2", 1)


def test_what_was_kept_is_there_again(file):
    assert recall(file) == {}
    remember(file, MICRO_BATCH, FOUR)
    remember(file, FOREACH, ONE_BY_ONE)
    assert recall(file) == {MICRO_BATCH: FOUR, FOREACH: ONE_BY_ONE}
    assert [path.name for path in file.parent.iterdir()] == [remembered_sizes.FILE_NAME]
    assert FOUR.when == "ran out of memory on 2026-11-22 (run 2026-11-22_10-00-00)"


def test_plans_that_differ_in_anything_have_files_of_their_own(tmp_path):
    plans = [("0123", "a card", "7.2", 1), ("0123", "a card", "7.2", 2), ("0123", "a card", "14", 1), ("99", "a card")]
    files = {file_for(tmp_path, *plan) for plan in plans}
    assert len(files) == len(plans)
    assert file_for(tmp_path, *plans[0]) in files
    assert {file.parents[1] for file in files} == {tmp_path / "memory"}


def test_the_smaller_size_stays(file):
    remember(file, MICRO_BATCH, FOUR)
    remember(file, MICRO_BATCH, Lowered(6, 7, "2026-11-23", "later"))
    assert recall(file) == {MICRO_BATCH: FOUR}
    two = Lowered(2, 4, "2026-11-23", "later")
    remember(file, MICRO_BATCH, two)
    assert recall(file) == {MICRO_BATCH: two}


GOOD = {"value": 4, "before": 8, "on": "2026-11-22", "run": "a"}


def of(entry, knob=MICRO_BATCH):
    return json.dumps({"format": 1, "lowered": {knob: entry}})


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "{}", "[]", "7", "null", '{"format": 1}', '{"format": 1, "lowered": []}', "\x00\xff", "[" * 100_000),
        json.dumps({"format": 2, "lowered": {MICRO_BATCH: GOOD}}),
        *map(of, ({}, None, [4], "4", {**GOOD, "more": 1}, {**GOOD, "value": "4"}, {**GOOD, "value": 0})),
        *map(of, ({**GOOD, "value": True}, {**GOOD, "value": 8}, {**GOOD, "before": None}, {**GOOD, "value": 2.5})),
        *map(of, ({**GOOD, "on": "yesterday"}, {**GOOD, "on": 7}, {**GOOD, "run": None})),
        of(GOOD, "seed"),
        of({**GOOD, "value": 1}, FOREACH),
    ],
    ids=lambda text: text[:60],
)
def test_what_is_damaged_or_of_another_make_is_told_and_written_anew(file, text):
    file.parent.mkdir(parents=True)
    file.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match="is no file of sizes that had to be lowered"):
        recall(file)
    remember(file, MICRO_BATCH, FOUR)
    assert recall(file) == {MICRO_BATCH: FOUR}


def test_a_knob_of_another_version_is_passed_over(file):
    remember(file, MICRO_BATCH, FOUR)
    kept = json.loads(file.read_text())
    kept["lowered"]["memory.of_tomorrow"] = {"value": "less"}
    file.write_text(json.dumps(kept))
    assert recall(file) == {MICRO_BATCH: FOUR}


def test_where_nothing_can_be_read_or_written_it_is_an_os_error(file, tmp_path):
    (tmp_path / "cache").write_text("a file")
    assert recall(file) == {}
    with pytest.raises(OSError, match=r"Not a directory|File exists"):
        remember(file, MICRO_BATCH, FOUR)
    other = file_for(tmp_path, "x")
    other.mkdir(parents=True)
    with pytest.raises(OSError, match="directory"):
        recall(other)


def test_who_reads_meanwhile_finds_a_whole_file(file):
    """Runs of one sweep may go down at the same time."""
    remember(file, MICRO_BATCH, Lowered(10_000, 10_001, "2026-11-22", "a"))

    def go_down() -> None:
        for size in range(300, 0, -1):
            remember(file, MICRO_BATCH, Lowered(size, size + 1, "2026-11-22", "b"))

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(go_down)
        while not writing.done():
            assert recall(file)[MICRO_BATCH].value >= 1
        writing.result()
    assert recall(file)[MICRO_BATCH].value == 1
    assert os.listdir(file.parent) == [remembered_sizes.FILE_NAME]


REMEMBER = """
import os
from pathlib import Path
from tests.kit.meeting import meet, meet_before
from wellfed.train.memory.remembered_sizes import FOREACH, MICRO_BATCH, Lowered, remember

meet_before("wellfed.train.memory.remembered_sizes.write_atomically", "write", at_most_s=1)
knob, lowered = [(MICRO_BATCH, Lowered(4, 8, "2026-11-22", "a")), (FOREACH, Lowered(False, None, "2026-11-22", "b"))][
    int(os.environ["MEETING_ME"])
]
meet("start")
remember(Path("memory") / "0123456789abcdef" / "remembered.json", knob, lowered)
"""


def test_two_runs_that_go_down_at_the_same_time_are_both_remembered(tmp_path):
    done = together([REMEMBER, REMEMBER], tmp_path / "meeting", cwd=tmp_path)
    assert [each.code for each in done] == [0, 0], done
    found = recall(tmp_path / "memory" / "0123456789abcdef" / "remembered.json")
    assert {knob: one.run for knob, one in found.items()} == {MICRO_BATCH: "a", FOREACH: "b"}


def test_a_lock_that_stays_held_stops_no_training(file, monkeypatch):
    prepared = importlib.import_module("wellfed.data.prepared")  # `wellfed.data.prepared` is the function
    monkeypatch.setattr(prepared, "SILENT_WAIT_S", 0.1)
    with ThreadPoolExecutor(1) as pool, prepared.only_builder(file.parent):
        pool.submit(remember, file, MICRO_BATCH, FOUR).result(timeout=30)
        assert recall(file) == {MICRO_BATCH: FOUR}


@pytest.mark.parametrize(
    ("kind", "facts", "knob", "value", "before"),
    [
        ("step_down", {"micro_batch": 4, "before": 8}, MICRO_BATCH, 4, 8),
        ("ladder", {"change": "workload.optimizer.foreach=false"}, FOREACH, False, None),
        ("step_down", {"evaluation_batch": 4, "before": 8}, None, None, None),
        ("ladder", {"change": "loader.device_prefetch=0"}, None, None, None),
        ("ladder", {"change": "memory.features=dynamic"}, None, None, None),
        ("oom", {"message": "CUDA out of memory"}, None, None, None),
        ("thrash", {"message": "..."}, None, None, None),
    ],
)
def test_which_events_are_remembered(kind, facts, knob, value, before):
    found = from_event(kind, facts, on=datetime.date(2026, 11, 22), run="a")
    assert found == (None if knob is None else (knob, Lowered(value, before, "2026-11-22", "a")))
