import csv
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import pytest
from PIL import Image

import wellfed
from tests.kit.wandb_files import stored
from wellfed.observe.loggers import sink as guard
from wellfed.observe.loggers import wandb_sink as room
from wellfed.observe.loggers.csv_table import CsvTable
from wellfed.observe.loggers.journal import Journal
from wellfed.observe.loggers.wandb_sink import WandbSink, decide_mode, is_logged_in, open_run
from wellfed.observe.telemetry.machines import HOST
from wellfed.observe.telemetry.metrics import COLUMNS, GPU_METRICS, HOST_METRICS
from wellfed.observe.telemetry.series import Sample
from wellfed.record import RunRecord


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
    """Removes logins and wandb variables from the environment; the home folder is empty."""
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
        **dict.fromkeys(["gpu*", "host/*", "node*"], "telemetry/time_s"),
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


def test_a_service_started_before_serves_the_run_and_later_variables_count(bare, tmp_path, monkeypatch):
    import wandb

    for notes in (None, "of the data module"):
        wandb.teardown()
        service = room.Service("offline")
        if notes:
            monkeypatch.setenv("WANDB_NOTES", notes)
        service.wait()
        has_started = "WANDB_SERVICE" in os.environ
        assert has_started is (notes is None)
        sink = opened(tmp_path, service=service)
        sink.log({"step": 1, "train/loss": 0.5})
        sink.finish({}, 0)
        found = stored(sink.folder)
        assert found.history == [{"step": 1, "train/loss": 0.5}]
        (run,) = found.of_type("run")
        assert run.get("notes") == notes


def test_the_installed_packages_are_stored(bare, tmp_path):
    sink = opened(tmp_path)
    sink.finish({}, 0)
    listed, until_s = sink.folder / "files" / "requirements.txt", time.monotonic() + 30
    while not listed.exists() and time.monotonic() < until_s:  # the service writes it
        time.sleep(0.01)
    assert f"torch=={version('torch')}" in listed.read_text().splitlines()


def test_a_run_that_breaks_is_told_once_and_raises_nothing(bare, tmp_path, caplog):
    lost: list[str] = []
    sink = opened(tmp_path, mode="offline", on_lost=lost.append)
    sink.run.finish()
    for step in range(3):
        sink.log({"step": step, "train/loss": 1.0})
    sink.finish({}, 0)
    assert len(lost) == 1
    assert caplog.text.count("wandb can't be written") == 1


def gpu_round(number, num_gpus=2):
    """Returns values that identify round, GPU and metric."""
    return [
        Sample(number / 3, number, "train", gpu, {
            metric.name: number + gpu / 8 + place / 100 for place, metric in enumerate(GPU_METRICS)
        })
        for gpu in range(num_gpus)
    ]  # fmt: skip


def host_round(number):
    values = {metric.name: number / 7 + place for place, metric in enumerate(HOST_METRICS)}
    return [Sample(number / 5, number, "train", HOST, values)]


@pytest.mark.slow
def test_curves_and_rows_of_three_threads_are_all_there_and_apart(bare, tmp_path, at_once):
    """Each row is exact and in order, none is lost or merged with another thread's."""
    num = 300
    lost: list[str] = []
    sink = opened(tmp_path, on_lost=lost.append)
    journal = Journal(RunRecord.start("r"), tmp_path, sink=sink)
    at_once(
        num,
        lambda step: journal.metrics("train", {"loss": 1 / (1 + step)}, step=step, epoch=step // 100),
        lambda number: journal.publish(gpu_round(number)),
        lambda number: journal.publish(host_round(number)),
    )
    sink.finish({}, 0)
    found = stored(sink.folder)
    assert len(found.history) == 3 * num
    assert [row for row in found.history if "step" in row] == [
        {"step": step, "epoch": step // 100, "train/loss": 1 / (1 + step)} for step in range(num)
    ]
    time_s = "telemetry/time_s"
    rounds = [(sample.gpu, sample) for number in range(num) for sample in gpu_round(number)]
    for gpu in (0, 1):
        for metric in GPU_METRICS:
            expected = [(sample.time_s, sample.values[metric.name]) for number, sample in rounds if number == gpu]
            assert found.curve(time_s, f"gpu{gpu}/{metric.name}") == expected
    for place, metric in enumerate(HOST_METRICS):
        expected = [(number / 5, number / 7 + place) for number in range(num)]
        assert found.curve(time_s, f"host/{metric.name}") == expected
    widths = {len(row) for row in found.history if time_s in row}
    assert widths == {1 + 2 * len(GPU_METRICS), 1 + len(HOST_METRICS)}
    assert lost == []


KILLED = """
import sys, time
from pathlib import Path
from tests.observe.loggers.test_wandb_sink import gpu_round, opened
from wellfed.record import RunRecord
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
    CsvTable(tmp_path / "telemetry.csv", COLUMNS, [].append).cut_after("step", 10**9)
    with (tmp_path / "telemetry.csv").open(newline="") as stream:
        rows = [(int(row["step"]), int(row["gpu"]), float(row["util_pct"])) for row in csv.DictReader(stream)]
    num_rounds = len(rows) // 2
    assert num_rounds in (last + 1, last + 2)  # printed means written
    assert rows == [(number, gpu, number + gpu / 8) for number in range(num_rounds) for gpu in (0, 1)]
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    found = stored(folder)
    assert found.exit_code is None
    curve = found.curve("telemetry/time_s", "gpu1/util_pct")
    assert 21 <= len(curve) <= num_rounds
    assert curve == [(number / 3, number + 1 / 8) for number in range(len(curve))]


@pytest.mark.slow
def test_runs_of_one_process_are_two_and_late_rows_reach_neither(bare, tmp_path, caplog):
    """A multirun in which a thread of the first run still logs after its end."""
    lost: list[str] = []
    folders = []
    sinks = []
    for number in range(2):
        sink = opened(tmp_path, name=str(number), on_lost=lost.append)
        for late in sinks:
            late.log({"telemetry/time_s": 99.0, "host/cpu_pct": 99.0})
        sink.log({"telemetry/time_s": 1.0, "host/cpu_pct": float(number)})
        folders.append(sink.folder)
        sink.finish({"test/loss": number}, number)
        sink.finish({"test/loss": -1}, 9)
        sink.log({"telemetry/time_s": 2.0, "host/cpu_pct": 2.0})
        sinks.append(sink)
    for number, found in enumerate(map(stored, folders)):
        assert found.history == [{"telemetry/time_s": 1, "host/cpu_pct": number}]
        assert found.exit_code == number
    assert sinks[0].id != sinks[1].id
    assert lost == []
    assert "can't be written" not in caplog.text


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


def test_a_row_that_comes_while_the_run_is_being_finished_is_dropped(held, thread, monkeypatch):
    """A long upload does not count as a hang."""
    monkeypatch.setattr(guard, "_PATIENCE_S", 0.02)
    lost: list[str] = []
    sink = WandbSink(held, "online", lost.append)
    finishing = thread.submit(sink.finish, {"a": 1}, 3)
    assert held.entered.wait(10)
    sink.log({"step": 1})
    sink.finish({}, 0)
    held.go_on.set()
    finishing.result(10)
    assert held.calls == [3]
    assert held.summary == {"a": 1}
    assert lost == []


def test_a_run_is_finished_after_the_row_that_is_under_way(held, thread):
    sink = WandbSink(held, "offline", lambda message: None)
    logging = thread.submit(sink.log, {"step": 1})
    assert held.entered.wait(10)
    with ThreadPoolExecutor(1) as other:
        finishing = other.submit(sink.finish, {}, 0)
        assert held.calls == [{"step": 1}]
        held.go_on.set()
        finishing.result(10)
    logging.result(10)
    assert held.calls == [{"step": 1}, 0]


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


def test_who_is_told_of_the_loss_may_use_the_sink(tmp_path):
    class Broken:
        def log(self, row):
            raise OSError("gone")

    told = []
    sink = WandbSink(Broken(), "offline", lambda message: (told.append(message), sink.log({"step": 2})))
    sink.log({"step": 1})
    assert told == ["gone"]


KILLED_SERVICE = """
import os, signal, sys
from pathlib import Path
from wellfed.observe.loggers.wandb_sink import open_run
lost = []
sink = open_run(Path(sys.argv[1]), mode="offline", project="p", entity=None, group=None, name="n", run_id=None,
                config={}, on_lost=lost.append)
children = [int(pid) for pid in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()]
assert children
for pid in children:
    os.kill(pid, signal.SIGKILL)
sink.log({"step": 1, "train/loss": 1.0})
sink.finish({}, 0)
print(len(lost))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds the service by /proc")
def test_a_service_that_is_killed_leaves_one_message_and_no_traceback(tmp_path):
    # wandb names its service there, which other tests of this process may have started.
    inherited = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}
    environment = {**inherited, "PYTHONPATH": str(Path(wellfed.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", KILLED_SERVICE, str(tmp_path)],
        capture_output=True, text=True, timeout=120, env=environment,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "1\n")
    assert "atexit" not in done.stderr
    assert "Traceback" not in done.stderr
