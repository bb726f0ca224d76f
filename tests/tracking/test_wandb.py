import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import wellfed
from wellfed.tracking import wandb as room
from wellfed.tracking.wandb import decide_mode, is_logged_in, open_run


@pytest.mark.parametrize(
    ("environ", "netrc", "expected"),
    [
        ({}, None, False),
        ({"WANDB_API_KEY": "k"}, None, True),
        ({"WANDB_API_KEY": ""}, None, False),
        ({"WANDB_IDENTITY_TOKEN_FILE": "t"}, None, True),
        ({}, "machine api.wandb.ai login user password k", True),
        ({}, "machine api.forge.coreweave.com login user password k", True),
        ({}, "machine example.org login user password k", False),
        ({}, "default login user password k", False),
        ({"WANDB_BASE_URL": "https://wandb.example.org"}, "machine wandb.example.org login u password k", True),
        ({"WANDB_BASE_URL": "https://wandb.example.org"}, "machine api.wandb.ai login u password k", False),
        ({}, "this is no netrc", False),
    ],
)
def test_wandb_login(tmp_path, environ, netrc, expected):
    if netrc is not None:
        (tmp_path / ".netrc").write_text(netrc)
    assert is_logged_in(environ, tmp_path) is expected


def test_wandb_login_in_a_named_file(tmp_path):
    (tmp_path / "mine").write_text("machine api.wandb.ai login user password k")
    assert is_logged_in({"NETRC": str(tmp_path / "mine")}, tmp_path / "home")
    assert not is_logged_in({"NETRC": str(tmp_path / "other")}, tmp_path)


@pytest.fixture
def bare(tmp_path, monkeypatch):
    """No login and no wish in the environment; the home folder is empty."""
    for name in [name for name in os.environ if name.startswith("WANDB_")] + ["NETRC"]:
        monkeypatch.delenv(name, raising=False)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    return home


def test_what_is_asked_for_wins(bare, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "online")
    for mode in ("online", "offline", "disabled"):
        assert decide_mode(mode) == mode


@pytest.mark.parametrize("mode", ["online", "offline", "disabled"])
def test_auto_obeys_the_environment(bare, monkeypatch, mode):
    monkeypatch.setenv("WANDB_API_KEY", "k")
    monkeypatch.setenv("WANDB_MODE", mode)
    assert decide_mode("auto") == mode


def test_auto_is_online_only_with_a_login(bare, monkeypatch):
    assert decide_mode("auto") == "offline"
    monkeypatch.setenv("WANDB_MODE", "nonsense")
    assert decide_mode("auto") == "offline"
    (bare / ".netrc").write_text("machine api.wandb.ai login user password k")
    assert decide_mode("auto") == "online"
    (bare / ".netrc").unlink()
    monkeypatch.setenv("WANDB_API_KEY", "k")
    assert decide_mode("auto") == "online"


def test_the_room_imports_without_wandb():
    code = "import sys, wellfed.tracking.wandb; print('wandb' in sys.modules)"
    source = {**os.environ, "PYTHONPATH": str(Path(wellfed.__file__).parents[1])}
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=source).stdout == "False\n"


def opened(folder, run_id=None, **changes):
    facts = {"mode": "offline", "project": "p", "entity": None, "group": "g", "name": "n", "config": {"seed": 1}}
    return open_run(folder, run_id=run_id, **{**facts, **changes})


def stored(sink):
    """What wandb's own reader finds in the file of a run."""
    (file,) = sink.folder.glob("*.wandb")
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def of_type(entries, kind):
    return [entry[kind] for entry in entries if entry["type"] == kind]


def points(entries):
    items = [entry["item"] for entry in of_type(entries, "history")]
    return [{key: value for key, value in item.items() if not key.startswith("_")} for item in items]


@pytest.fixture
def runs(bare, tmp_path):
    """Two runs in one process; the first is not finished by its owner. Then the second is continued."""
    first = opened(tmp_path)
    first.log({"step": 5, "epoch": 0, "train/loss": 0.5, "val/loss": None})
    first.log({"step": 10, "epoch": 1, "train/loss": 0.25})
    second = opened(tmp_path)
    second.log({"step": 7, "train/loss": 1.0})
    second.finish({"test/loss": 0.125}, 0)
    again = opened(tmp_path, run_id=second.id)
    again.log({"step": 8, "train/loss": 2.0})
    again.finish({}, 3)
    return first, second, again


def test_runs_are_stored_apart_with_their_rows_axes_summary_and_exit_code(runs, tmp_path, caplog):
    first, second, again = runs
    assert first.id != second.id == again.id
    assert len({first.folder, second.folder, again.folder}) == 3
    assert {sink.folder.parent for sink in runs} == {tmp_path / "wandb"}
    one, two, three = (stored(sink) for sink in runs)
    assert points(one) == [{"step": 5, "epoch": 0, "train/loss": 0.5}, {"step": 10, "epoch": 1, "train/loss": 0.25}]
    assert points(two) == [{"step": 7, "train/loss": 1}]
    assert points(three) == [{"step": 8, "train/loss": 2}]
    axes = {entry.get("glob_name") or entry.get("name"): entry["step_metric"] for entry in of_type(one, "metric")}
    assert axes == dict.fromkeys(["train/*", "val/*", "test/*", "step/*", "throughput/*", "epoch"], "step")
    assert {"test/loss": 0.125} in [entry.get("update") for entry in of_type(two, "summary")]
    assert [of_type(entries, "exit")[0].get("exit_code", 0) for entries in (one, two, three)] == [0, 0, 3]
    (run,) = of_type(one, "run")
    assert (run["project"], run["display_name"], run["run_group"]) == ("p", "n", "g")
    assert run["config"]["update"]["seed"] == 1
    first.log({"step": 11})  # finished long since
    first.log({"step": 12})
    first.finish({"a": 1}, 0)
    assert caplog.text.count("wandb can't be written") == 1


def test_online_falls_back_to_offline_with_a_warning(bare, tmp_path, monkeypatch, caplog):
    import wandb

    monkeypatch.setattr(room, "_INIT_TIMEOUT_S", 1)
    begin, modes = wandb.init, []

    def init(**options):
        modes.append(options["mode"])
        if options["mode"] == "online":
            raise wandb.errors.CommError("no network")
        return begin(**options)

    monkeypatch.setattr(wandb, "init", init)
    lost: list[str] = []
    sink = opened(tmp_path, mode="online", on_lost=lost.append)
    sink.finish({}, 0)
    assert lost == ["no network"]
    assert (sink.mode, modes) == ("offline", ["online", "offline"])
    assert "wandb can't be reached (no network); going on offline." in caplog.text


@pytest.mark.parametrize("mode", ["offline", "online"])
def test_a_wandb_that_cannot_start_is_one_error(bare, tmp_path, monkeypatch, mode):
    import wandb

    def init(**options):
        raise wandb.errors.UsageError("broken")

    monkeypatch.setattr(wandb, "init", init)
    with pytest.raises(RuntimeError, match="wandb can't be started: broken"):
        opened(tmp_path, mode=mode)


def test_a_run_that_breaks_is_told_once_and_raises_nothing(bare, tmp_path, caplog):
    lost: list[str] = []
    sink = opened(tmp_path, mode="offline", on_lost=lost.append)
    sink._run.finish()
    for step in range(3):
        sink.log({"step": step, "train/loss": 1.0})
    sink.finish({}, 0)
    assert len(lost) == 1
    assert caplog.text.count("wandb can't be written") == 1
