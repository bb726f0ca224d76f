import errno
import json
import math
import os
import socket
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import wellfed
from tests.kit.meeting import together
from wellfed.process import process_start
from wellfed.record import files
from wellfed.record.entries import RunRecord, differences, read
from wellfed.record.files import write_atomically
from wellfed.record.provenance import git_state

WITH_SOURCE = {**os.environ, "PYTHONPATH": str(Path(wellfed.__file__).parents[1])}


def strict(text):
    def refuse(name):
        raise ValueError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def running(folder, **changes):
    """A record of a running process, changed."""
    made = RunRecord.start("r")
    for name, value in changes.items():
        setattr(made, name, value)
    made.write(folder)
    return read(folder)["status"]


def dead_pid():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_it_starts_as_running_in_this_process():
    made = RunRecord.start("2026-01-01_00-00-00_abcd")
    assert (made.status, made.schema, made.pid) == ("running", 2, os.getpid())
    assert made.started_at.endswith("+00:00")
    assert made.boot_id
    assert made.host_name == socket.gethostname()


def test_what_is_written_is_read(tmp_path):
    made = RunRecord("r", status="ok", overrides=["a=1"], metrics={"test/x": 0.5}, epochs=1.5)
    made.write(tmp_path)
    assert read(tmp_path) == {spec.name: getattr(made, spec.name) for spec in fields(RunRecord)}


def test_what_is_no_finite_number_is_null():
    values = {"a": math.nan, "b": math.inf, "c": [-math.inf, 1.5], "d": np.float32("nan")}
    found = strict(RunRecord("r", config=values).to_json())["config"]
    assert found == {"a": None, "b": None, "c": [None, 1.5], "d": None}


def test_numbers_of_numpy_stay_numbers_and_the_rest_becomes_text():
    values = {"a": np.float32(0.5), "b": np.int64(3), 4: (1, True), "p": Path("x") / "y", "t": "\udc80"}
    found = strict(RunRecord("r", config=values).to_json())["config"]
    assert found == {"a": 0.5, "b": 3, "4": [1, True], "p": str(Path("x") / "y"), "t": "\udc80"}
    assert found["4"][1] is True


trees = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@settings(max_examples=30)
@given(st.dictionaries(st.text(), trees, max_size=3))
def test_any_tree_is_strict_json_and_does_not_change_when_read_and_written_again(tree):
    found = strict(RunRecord("r", config=tree).to_json())["config"]
    assert found == files.plain(tree)
    assert files.plain(found) == found


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"schema": 1}', '{"schema": null}', "\x00\x00"])
def test_what_is_no_record_is_a_value_error_that_names_the_file(tmp_path, text):
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(ValueError, match="run.json"):
        read(tmp_path)


def test_no_record_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        read(tmp_path)


def test_running_stays_running_while_its_process_lives(tmp_path):
    assert running(tmp_path) == "running"
    assert running(tmp_path, pid=1, process_start=None) == "running"  # of an earlier version; another user's, for most


def test_a_dead_process_was_killed(tmp_path):
    assert running(tmp_path, pid=dead_pid()) == "killed"
    assert running(tmp_path, pid=0) == "killed"
    assert running(tmp_path, boot_id="another boot") == "killed"
    assert running(tmp_path, process_start=process_start(os.getpid()) + 1) == "killed"  # another has its number now


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_process_that_nobody_has_waited_for_was_killed(tmp_path):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        start = process_start(process.pid)
        assert running(tmp_path, pid=process.pid, process_start=start) == "running"
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert running(tmp_path, pid=process.pid, process_start=start) == "killed"


def test_another_host_is_not_ours_to_judge(tmp_path):
    assert running(tmp_path, host_name="elsewhere", pid=dead_pid(), boot_id="its own") == "running"


def test_only_a_running_record_is_judged(tmp_path):
    assert running(tmp_path, status="ok", pid=dead_pid()) == "ok"


LOOP = """
import sys
from pathlib import Path
from wellfed.record.entries import RunRecord
made, folder = RunRecord.start("r"), Path(sys.argv[1])
made.write(folder)
print("ready", flush=True)
while True:
    made.steps += 1
    made.config = {"padding": "x" * 20_000 * (made.steps % 7)}
    made.write(folder)
"""


def test_a_kill_in_the_middle_of_writing_leaves_a_whole_record(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", LOOP, str(tmp_path)], stdout=subprocess.PIPE, env=WITH_SOURCE)
    with process:
        try:
            assert process.stdout.readline() == b"ready\n"
            seen = set()
            while len(seen) < 20:  # a reader beside the writer
                found = read(tmp_path)
                assert found["status"] == "running"
                seen.add(found["steps"])
        finally:
            process.kill()  # SIGKILL, in the middle of whatever it does
    found = read(tmp_path)
    assert found["status"] == "killed"
    assert found["steps"] >= max(seen)


def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside_it(tmp_path, monkeypatch):
    write_atomically(tmp_path / "f", "old")
    for error in (OSError(errno.ENOSPC, "full"), KeyboardInterrupt()):

        def fail(descriptor, error=error):
            raise error

        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(type(error)):
            write_atomically(tmp_path / "f", "new")
        assert [path.name for path in tmp_path.iterdir()] == ["f"]
        assert (tmp_path / "f").read_text() == "old"


WRITE = """
import os
from pathlib import Path
from tests.kit.meeting import meet_before
from wellfed.record.files import write_atomically
os.getpid = lambda: 1
meet_before("pathlib.Path.replace", "written")
write_atomically(Path("f"), os.environ["MEETING_ME"] * 100_000)
"""
"""Writes as process 1, as each container has one."""


def test_two_containers_write_a_file_at_the_same_time(tmp_path):
    done = together([WRITE, WRITE], tmp_path / "meeting", cwd=tmp_path)
    assert [each.code for each in done] == [0, 0], done
    assert (tmp_path / "f").read_text() in ("0" * 100_000, "1" * 100_000)
    assert {path.name for path in tmp_path.iterdir()} == {"f", "meeting"}


def git(folder, *words):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", str(folder), *identity, *words], check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path):
    git(tmp_path, "init")
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "file").write_text("one\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "first")
    return tmp_path


def test_git_state_of_a_clean_checkout(checkout):
    found = git_state(checkout / "inner")
    assert len(found["commit"]) == 40
    assert (found["dirty"], found["changed"], found["digest"]) == (False, [], "")


def test_git_state_tells_a_change_and_a_new_file_anywhere_in_the_checkout(checkout):
    (checkout / "new").write_text("x")
    assert git_state(checkout / "inner")["changed"] == ["new"]
    (checkout / "new").unlink()
    digests = set()
    for text in ("two\n", "three\n"):
        (checkout / "inner" / "file").write_text(text)
        found = git_state(checkout / "inner")
        assert found["dirty"]
        assert found["changed"] == ["inner/file"]
        digests.add(found["digest"])
    assert len(digests) == 2


def test_a_users_diff_program_is_not_asked(checkout):
    git(checkout, "config", "diff.external", "false")
    (checkout / "inner" / "file").write_text("two\n")
    assert git_state(checkout)["digest"]


def test_git_state_outside_a_checkout_or_without_git(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_state(tmp_path) is None
    monkeypatch.setenv("PATH", "")
    assert git_state(Path(__file__).parent) is None


def test_differences_name_every_leaf():
    old = {"a": {"b": 1, "gone": 2}, "same": [1], "list": [1, 2]}
    new = {"a": {"b": 3, "new": 4}, "same": [1], "list": [1]}
    assert differences(old, new) == [("a.b", 1, 3), ("a.gone", 2, None), ("a.new", None, 4), ("list", [1, 2], [1])]
    assert differences({"fill": float("nan")}, {"fill": float("nan")}) == []


def typed(tmp_path, **changes):
    """A record with other keys than it was written with; ... = not there."""
    found = {**json.loads(RunRecord("r", status="ok").to_json()), **changes}
    (tmp_path / "run.json").write_text(json.dumps({key: value for key, value in found.items() if value is not ...}))
    return RunRecord.read(tmp_path)
