import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from PIL import Image

import wellfed
from tests.kit.wandb_files import stored
from wellfed.observe.loggers import sink as guard
from wellfed.observe.loggers import wandb_sink
from wellfed.observe.loggers.csv_table import read_rows
from wellfed.observe.loggers.wandb_sink import WandbSink, decide_mode, is_logged_in, open_run
from wellfed.observe.telemetry.metrics import GPU_METRICS
from wellfed.observe.telemetry.series import Sample


@pytest.mark.parametrize(
    ("environ", "netrc", "expected"),
    [
        ({}, None, False),
        ({"WANDB_API_KEY": "k"}, None, True),
        ({}, "machine api.wandb.ai login user password k", True),
        ({}, "machine api.forge.coreweave.com login user password k", True),
        ({}, "default login user password k", False),
        ({"WANDB_BASE_URL": "https://wandb.example.org"}, "machine wandb.example.org login u password k", True),
        ({}, "this is no netrc", False),
    ],
)
def test_wandb_login(tmp_path, environ, netrc, expected):
    if netrc is not None:
        (tmp_path / ".netrc").write_text(netrc)
    assert is_logged_in(environ, tmp_path) is expected


@pytest.fixture
def bare(tmp_path, monkeypatch):
    """Removes logins and wandb variables from the environment; the home folder is empty."""
    for name in [name for name in os.environ if name.startswith("WANDB_")] + ["NETRC"]:
        monkeypatch.delenv(name, raising=False)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    return home


def test_auto_is_online_only_with_a_login(bare, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "nonsense")
    assert decide_mode("auto") == "offline"
    (bare / ".netrc").write_text("machine api.wandb.ai login user password k")
    assert decide_mode("auto") == "online"


def opened(folder, run_id=None, **changes):
    facts = {
        "mode": "offline",
        "project": "p",
        "entity": None,
        "group": "g",
        "name": "n",
        "tags": ["a", "b"],
        "config": {"seed": 1},
    }
    return open_run(folder, run_id=run_id, **{**facts, **changes})


def with_command_line(sink):
    """The sink, once wandb has written the command line, which it does a moment after opening the run."""
    until_s = time.monotonic() + 30
    while not any(b"api_key" in path.read_bytes() for path in sink.folder.glob("*.wandb")):
        assert time.monotonic() < until_s, "wandb wrote no command line"
        time.sleep(0.01)
    return sink


@pytest.fixture
def runs(bare, tmp_path, monkeypatch):
    """Opens two runs in one process without finishing the first, then continues the second."""
    monkeypatch.setattr(sys, "argv", ["train.py", "+workload.data.api_key=PLANTED-abc", "seed=2"])
    first = with_command_line(opened(tmp_path))
    first.log({"step": 5, "epoch": 0, "train/loss": 0.5, "val/loss": None})
    first.log({"step": 10, "epoch": 1, "train/loss": 0.25})
    second = with_command_line(opened(tmp_path))
    second.log({"step": 7, "train/loss": 1.0})
    second.finish({"test/loss": 0.125}, 0)
    again = with_command_line(opened(tmp_path, run_id=second.id))
    again.log({"step": 8, "train/loss": 2.0})
    again.finish({}, 3)
    return first, second, again


def test_runs_are_stored_apart_with_their_rows_axes_summary_and_exit_code(runs, tmp_path, caplog):
    first, second, again = runs
    assert first.id != second.id == again.id
    assert len({first.folder, second.folder, again.folder}) == 3
    assert {sink.folder.parent for sink in runs} == {tmp_path / "wandb"}
    one, two, three = (stored(sink.folder) for sink in runs)
    assert one.history == [{"step": 5, "epoch": 0, "train/loss": 0.5}, {"step": 10, "epoch": 1, "train/loss": 0.25}]
    assert two.history == [{"step": 7, "train/loss": 1}]
    assert three.history == [{"step": 8, "train/loss": 2}]
    assert one.axes == {
        **dict.fromkeys(["train/*", "val/*", "test/*", "step/*", "throughput/*", "epoch"], "step"),
        **dict.fromkeys(["gpu*", "host/*"], "telemetry/time_s"),
    }
    assert one.hidden == {"step", "telemetry/time_s"}
    assert {"test/loss": 0.125} in [entry.get("update") for entry in two.of_type("summary")]
    assert [found.exit_code for found in (one, two, three)] == [0, 0, 3]
    for sink, found in zip(runs, (one, two, three), strict=True):  # it keeps the command line
        kept = json.dumps(found.entries) + "".join(path.read_text() for path in sink.folder.glob("files/*.json"))
        assert "PLANTED" not in kept
        assert "+workload.data.api_key='***'" in kept
    assert sys.argv[1].endswith("PLANTED-abc")
    (run,) = one.of_type("run")
    assert (run["project"], run["display_name"], run["run_group"]) == ("p", "n", "g")
    assert run["tags"] == ["a", "b"]
    assert run["config"]["update"]["seed"] == 1
    first.log({"step": 11})  # finished long since
    first.log({"step": 12})
    first.finish({"a": 1}, 0)
    assert caplog.text.count("wandb can't be written") == 1


def test_each_row_of_the_users_code_arrives_beside_ours(bare, tmp_path):
    """wandb drops rows whose step is below its own counter, which every row without a step advances."""
    sink, steps = opened(tmp_path), range(30)
    import wandb

    for step in steps:
        wandb.log({"a/with_step": step}, step=step)
        wandb.log({"a/of_the_same_step": step}, step=step, commit=False)
        wandb.log({"a/without_step": step})
        if step % 3 == 0:
            sink.log({"step": step, "train/loss": step / 8})
        sink.run.log({"a/by_logger": step, "trainer/global_step": step})
        sink.log({"telemetry/time_s": step / 4, "host/cpu_pct": step})
    wandb.log({"a/earlier": 1.0}, step=2)
    sink.finish({}, 0)
    found = stored(sink.folder)
    for name in ("a/with_step", "a/of_the_same_step"):
        assert found.curve("step", name) == [(step, step) for step in steps]
        assert found.axes[name] == "step"
    for name in ("a/without_step", "a/by_logger"):
        assert [row[name] for row in found.history if name in row] == list(steps)
    assert found.curve("step", "a/earlier") == [(2, 1)]
    assert found.curve("step", "train/loss") == [(step, step / 8) for step in steps[::3]]
    assert found.curve("telemetry/time_s", "host/cpu_pct") == [(step / 4, step) for step in steps]


@pytest.mark.slow
def test_tables_pages_and_pictures_are_stored_beside_the_rows(bare, tmp_path):
    page, picture = tmp_path / "report.html", tmp_path / "confusion.png"
    Image.new("RGB", (4, 3)).save(picture)
    page.write_text("<!doctype html><p>report")
    lost = []
    sink = opened(tmp_path, on_lost=lost.append)
    sink.table("findings", ("id", "message"), [["slow_copy", "12 % of a step"]])
    sink.file("report", page)
    sink.file("confusion", picture)
    sink.file("gone", tmp_path / "gone.html")
    sink.finish({"a": 1}, 0)
    items = {name: value for row in stored(sink.folder).history for name, value in row.items()}
    files = sink.folder / "files"
    assert json.loads((files / items["findings.path"]).read_text())["data"] == [["slow_copy", "12 % of a step"]]
    assert items["report._type"] == "html-file"
    assert (files / items["report.path"]).read_text() == "<!doctype html><p>report"
    assert (items["confusion._type"], items["confusion.width"]) == ("image-file", 4)
    assert "gone._type" not in items
    assert len(lost) == 1


def test_online_falls_back_to_offline_with_a_warning(bare, tmp_path, monkeypatch, caplog):
    import wandb

    monkeypatch.setattr(wandb_sink, "_INIT_TIMEOUT_S", 1)
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


def gpu_round(number, num_gpus=2):
    """Returns values that identify round, GPU and metric."""
    return [
        Sample(number / 3, number, "train", gpu, {
            name: number + gpu / 8 + place / 100 for place, name in enumerate(GPU_METRICS)
        })
        for gpu in range(num_gpus)
    ]  # fmt: skip


KILLED = """
import sys, time
from pathlib import Path
from tests.observe.loggers.test_wandb_sink import gpu_round, opened
from wellfed.record.entries import RunRecord
from wellfed.observe.loggers.journal import Journal
folder = Path(sys.argv[1])
sink = opened(folder)
journal = Journal(RunRecord.start("r"), folder, sink=sink)
for number in range(10**9):
    journal.telemetry(gpu_round(number))
    journal.publish(gpu_round(number))
    print(number, flush=True)
    if number == 20:
        time.sleep(0.5)
"""


@pytest.mark.slow
def test_a_kill_leaves_the_rounds_so_far_in_the_table_and_those_of_a_moment_ago_in_the_file_of_wandb(bare, tmp_path):
    """After a kill wandb's file has all rows of half a second before, and no false end."""
    roots = os.pathsep.join([str(Path(wellfed.__file__).parents[1]), str(Path(__file__).parents[3])])
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    environ = {**os.environ, "PYTHONPATH": roots}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as process:
        for line in process.stdout:
            if int(line) == 22:
                break
        process.send_signal(signal.SIGKILL)
        last = int([line, *process.stdout][-1])  # what the pipe still holds was done, too
    table = read_rows(tmp_path / "telemetry.csv")
    rows = [(int(row["step"]), int(row["gpu"]), float(row["util_pct"])) for row in table]
    num_rounds = len(rows) // 2
    assert num_rounds in (last + 1, last + 2)  # printed means written
    assert rows == [(number, gpu, number + gpu / 8) for number in range(num_rounds) for gpu in (0, 1)]
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    found = stored(folder)
    assert found.exit_code is None
    curve = found.curve("telemetry/time_s", "gpu1/util_pct")
    assert 21 <= len(curve) <= num_rounds
    assert curve == [(number / 3, number + 1 / 8) for number in range(len(curve))]


class Held:
    """A wandb run whose calls wait for an event."""

    def __init__(self):
        self.entered, self.go_on = threading.Event(), threading.Event()
        self.calls, self.summary = [], {}

    def log(self, row):
        self._wait(row)

    def finish(self, exit_code):
        self._wait(exit_code)

    def _wait(self, what):
        self.calls.append(what)
        self.entered.set()
        assert self.go_on.wait(10)


@pytest.fixture
def held():
    run = Held()
    yield run
    run.go_on.set()


@pytest.fixture
def thread():
    with ThreadPoolExecutor(1) as pool:
        yield pool


def test_a_wandb_that_hangs_holds_up_neither_other_rows_nor_the_end(held, thread, monkeypatch, caplog):
    monkeypatch.setattr(guard, "_PATIENCE_S", 0.02)
    lost: list[str] = []
    sink = WandbSink(held, "offline", lost.append)
    hanging = thread.submit(sink.log, {"step": 1})
    assert held.entered.wait(10)
    sink.log({"step": 2})
    monkeypatch.setattr(guard, "_PATIENCE_S", 60)
    sink.log({"step": 3})  # does not wait again
    monkeypatch.setattr(guard, "_PATIENCE_S", 0.02)
    sink.finish({}, 0)
    assert held.calls == [{"step": 1}]
    assert lost == ["no answer for 0.02 s"]
    assert caplog.text.count("wandb can't be written") == 1
    held.go_on.set()
    hanging.result(10)
    sink.finish({}, 0)  # it came round after all: the run is closed
    assert held.calls == [{"step": 1}, 0]
