"""The page of a run is renewed while it runs, by a process that costs little and leaves nothing behind."""

import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.end_to_end.commands import FAST, ROOT
from tests.end_to_end.many_processes import left_in as left_behind
from tests.end_to_end.many_processes import started, until
from tests.kit.made_run import made_run
from wellfed.explain.report import renewal
from wellfed.record import RunRecord, write_atomically
from wellfed.run.page_renewal import PageRenewal


class Events(list[tuple[str, dict[str, Any]]]):
    def __call__(self, kind: str, **facts: Any) -> None:
        self.append((kind, facts))


@pytest.fixture(autouse=True)
def at_any_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests can't wait until a renewal has paid."""
    renewed = PageRenewal._renewed
    monkeypatch.setattr(PageRenewal, "_renewed", lambda self: renewed(self) / 1000)


def running(folder: Path, **more: Any) -> Path:
    """A run of this process."""
    me = RunRecord.start("r")
    of_process = {name: getattr(me, name) for name in ("pid", "host_name", "boot_id", "process_start")}
    made_run(folder, **{"status": "running", **of_process, **more})
    return folder


def renewals() -> list[psutil.Process]:
    """Processes that renew a page; other tests leave others."""
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.Error):
            found += [child] * (renewal.__name__ in child.cmdline())
    return found


def left_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.endswith(".tmp")]


def test_the_page_is_written_while_the_block_lasts_and_again(tmp_path: Path) -> None:
    folder, events = running(tmp_path), Events()
    page = folder / "report.html"
    with PageRenewal(folder, events, every_s=0.05):
        until(page.exists)
        first = page.read_text()
        running(tmp_path, steps=250)
        until(lambda: "250 steps in" in page.read_text())
    assert "200 steps in" in first
    assert 'http-equiv="refresh"' in first
    assert re.search(r"Written <time datetime=\"[\dT:Z-]{20}\">[\d: -]{19} UTC</time>, while the run went on", first)
    assert (events, left_in(folder), renewals()) == ([], [], [])
    page.unlink()
    time.sleep(0.3)
    assert not page.exists()


def test_failures_are_one_event_and_no_end(tmp_path: Path) -> None:
    folder, events = running(tmp_path), Events()
    whole = (folder / "run.json").read_text()
    write_atomically(folder / "run.json", whole[: len(whole) // 2])
    watching = PageRenewal(folder, events, every_s=0.05)
    with watching:
        until(lambda: events)
        time.sleep(2.5)  # more of them
        write_atomically(folder / "run.json", whole)
        until((folder / "report.html").exists)
    ((kind, facts),) = events
    assert kind == "page_failed"
    assert "run.json is not a run record" in facts["message"]


def test_a_renewal_in_progress_ends_with_the_block(tmp_path: Path) -> None:
    folder, events = running(tmp_path, steps=100_000), Events()
    for after_s in (0.05, 0.4, 0.9):
        with PageRenewal(folder, events, every_s=0.01):
            until(renewals)
            time.sleep(after_s)
            began_s = time.monotonic()
        assert time.monotonic() - began_s < 2
        assert (renewals(), left_in(folder), events) == ([], [], [])
        assert after_s > 0.1 or not (folder / "report.html").exists()


def test_it_takes_a_hundredth_of_a_core_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = running(tmp_path)
    monkeypatch.setattr(renewal.time, "process_time", lambda: 0.3)
    assert renewal.main(folder) == 30.0  # once a minute is seldom enough
    assert 'data-due="60.0"' in (folder / "report.html").read_text()
    monkeypatch.setattr(renewal.time, "process_time", lambda: 2.5)
    assert renewal.main(folder) == 250.0
    assert 'data-due="500.0"' in (folder / "report.html").read_text()


def test_a_page_that_takes_long_is_renewed_less_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for paid_after_s, is_often in ((100.0, False), (0.0, True)):
        began_s = list[float]()
        monkeypatch.setattr(
            PageRenewal, "_renewed", lambda self, to=began_s, s=paid_after_s: to.append(time.monotonic()) or s
        )
        with PageRenewal(tmp_path, Events(), every_s=0.01):
            time.sleep(0.5)
        assert (len(began_s) > 1) is is_often
        assert began_s


def test_it_gives_way_to_the_training(tmp_path: Path) -> None:
    code = "from wellfed.explain.report.renewal import yield_to_the_run as y; y(); import os, resource, sys\n"
    code += "from wellfed.explain.report import renewal; renewal.main(__import__('pathlib').Path(sys.argv[1]))\n"
    code += "print(os.nice(0), open('/proc/self/oom_score_adj').read().strip(), 'torch' in sys.modules)\n"
    code += "bytes(2**30 + 1)\n"
    done = subprocess.run(
        [sys.executable, "-c", code, str(running(tmp_path))], capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["19", "1000", "False"], done.stderr
    assert "MemoryError" in done.stderr


def test_the_last_page_of_a_run_that_has_ended_stays(tmp_path: Path) -> None:
    folder = running(tmp_path, status="ok")
    (folder / "report.html").write_text("the last page")
    renewal.main(folder)
    assert (folder / "report.html").read_text() == "the last page"


def test_a_run_that_was_killed_meanwhile_does_not_go_on(tmp_path: Path) -> None:
    folder = running(tmp_path, pid=2**22 + 1)
    renewal.main(folder)
    page = (folder / "report.html").read_text()
    assert ">killed</span>" in page
    assert 'http-equiv="refresh"' not in page


@pytest.mark.slow
@pytest.mark.parametrize("is_killed", [False, True])
def test_a_browser_can_follow_a_real_run_to_its_end(is_killed: bool, tmp_path: Path) -> None:
    script, folder = tmp_path / "often.py", tmp_path / "run"
    page = folder / "report.html"
    script.write_text(
        "import runpy, sys\n"
        "from wellfed.run.page_renewal import PageRenewal\n"
        "PageRenewal.__init__.__kwdefaults__['every_s'], renewed = 0.2, PageRenewal._renewed\n"
        "PageRenewal._renewed = lambda self: renewed(self) / 1000\n"
        f"sys.argv[0] = {str(ROOT / 'src' / 'train.py')!r}\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    arguments = [*FAST, "logger=none", "trainer.max_steps=100000", "trainer.max_epochs=1000", f"hydra.run.dir={folder}"]
    with started(script, arguments, cwd=tmp_path, python_path=str(ROOT / "src")) as process:
        until(page.exists, process)
        steps = counted(page)
        until(lambda: counted(page) > steps, process)
        process.send_signal(signal.SIGKILL if is_killed else signal.SIGINT)
        process.wait(60)
        until(lambda: left_behind(tmp_path) == [])  # a renewal that had begun ends
    shown, record = page.read_text(), RunRecord.read(folder)
    assert record.status == ("killed" if is_killed else "interrupted")
    assert ("while the run went on" in shown or ">killed</span>" in shown) is is_killed
    assert 'http-equiv="refresh"' not in shown or is_killed
    assert "page_failed" not in {event["kind"] for event in record.events}


def counted(page: Path) -> int:
    found = re.search(r"(\d+) steps? in", page.read_text())
    return 0 if found is None else int(found[1])
