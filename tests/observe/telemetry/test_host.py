import multiprocessing
import subprocess
import sys
import threading
import time
from collections import namedtuple
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil
import pytest

from wellfed.observe.telemetry.host import HostSource, WholeHostSource
from wellfed.observe.telemetry.series import HOST

BURNED_S = 0.4
"""The system counts in ticks of 10 ms, so a little less may show."""
CHILD = f"""
import subprocess, sys, time
def burn():
    until_s = time.process_time() + {BURNED_S}
    while time.process_time() < until_s:
        pass
held = bytearray(b"x") * (64 * 2**20)
print("here", flush=True)
for order in map(str.strip, sys.stdin):
    if order == "start":
        own = subprocess.Popen(sys.orig_argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        own.stdout.readline()
    elif order == "let burn":
        print("burn", file=own.stdin, flush=True)
        own.stdout.readline()
    else:
        burn()
    print("done", flush=True)
"""


class Child:
    """A process that holds 64 MiB, and burns CPU time or lets a child of its own do so when told."""

    def __init__(self):
        self._process = subprocess.Popen(
            [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._heard("here")

    @property
    def process(self):
        return psutil.Process(self._process.pid)

    def _heard(self, word):
        assert self._process.stdout.readline() == f"{word}\n"

    def do(self, order):
        """It has done so on return."""
        self._process.stdin.write(f"{order}\n")
        self._process.stdin.flush()
        self._heard("done")

    def burn(self):
        """It has used so much more CPU time on return."""
        self.do("burn")

    def end(self, *, wait=True):
        self._process.kill()
        if wait:
            self._process.wait()
            self._process.stdin.close()
            self._process.stdout.close()


@pytest.fixture
def child():
    process = Child()
    yield process
    process.end()


class Host:
    """A source on a clock that only the test turns, far enough for processes to be looked for anew."""

    def __init__(self, **options):
        self.now_s = 0.0
        self.source = HostSource(now_s=lambda: self.now_s, **options)

    def read(self, after_s=0.0):
        self.now_s += after_s
        (reading,) = self.source.read(slow=False)
        assert reading.gpu == HOST
        return reading.values

    def spent_s(self):
        """CPU seconds counted since the reading before."""
        return self.read(after_s=1000.0)["cpu_pct"] / 100 * 1000


def test_the_first_reading_has_memory_and_no_cpu():
    host = Host()
    assert set(host.read()) == {"rss_gib"}
    assert set(host.read(after_s=1.0)) >= {"cpu_pct", "rss_gib", "loader_cpu_pct"}
    own = psutil.Process()
    rss = sum(process.memory_info().rss for process in (own, *own.children(recursive=True)))
    assert host.read()["rss_gib"] == pytest.approx(rss / 2**30, rel=0.2)


def test_a_childs_cpu_counts_from_its_first_reading_on(child):
    host = Host(process=child.process)  # this process may have children that earlier tests left at work
    host.read()
    child.do("start")
    child.do("let burn")
    assert host.spent_s() < 0.5 * BURNED_S
    child.do("let burn")
    assert host.spent_s() >= 0.9 * BURNED_S
    assert host.spent_s() < 0.5 * BURNED_S  # what it did before is not counted again


def cpu_s(process):
    return sum(process.cpu_times()[:2])


Times = namedtuple("Times", "user nice system idle iowait irq softirq steal guest guest_nice")  # as Linux has them


def machines(*readings):
    """A machine that gives these, one after the other."""
    left = iter(readings)
    return lambda: next(left)


def test_what_others_take_and_waiting_for_the_disk_is_told(child):
    before = Times(100, 1, 10, 500, 20, 2, 3, 4, 50, 0)
    after = Times(105, 1.5, 12, 510, 22, 2.25, 3.25, 4, 55, 0)  # 8 s at work, 2 of 20 s waiting for the disk
    host = Host(machine=machines(before, after), process=child.process)
    host.read()
    own_s = cpu_s(child.process)
    values = host.read(after_s=10.0)
    own_s = cpu_s(child.process) - own_s
    assert values["others_cpu_pct"] == pytest.approx(80, abs=10 * own_s + 1)
    assert values["iowait_pct"] == pytest.approx(10)


@contextmanager
def data_worker():
    """Yields a process that multiprocessing has started, and the connection for its orders."""
    fork = multiprocessing.get_context("fork")
    orders = fork.Pipe()
    worker = fork.Process(target=work, args=(orders[1],), daemon=True)
    worker.start()
    try:
        assert orders[0].recv() == "here"
        yield worker, orders[0]
    finally:
        worker.kill()
        worker.join()


def burn_in(orders):
    orders.send("burn")
    assert orders.recv() == "done"


def test_data_workers_are_told_from_other_processes(child):
    host = Host()
    with data_worker() as (_, orders):
        host.read()
        child.burn()
        assert host.read(after_s=1000.0)["loader_cpu_pct"] == 0
        burn_in(orders)
        values = host.read(after_s=1000.0)
        assert 0.9 * BURNED_S <= values["loader_cpu_pct"] * 10 <= values["cpu_pct"] * 10 + 1e-9


@pytest.mark.parametrize("ends_before", [False, True])
def test_workers_that_start_and_end_between_readings_count_once(ends_before):
    """The machine's busy time has theirs, which would otherwise be other programs' work."""
    host = Host()
    host.read()
    host.source._search_at_s = 1e9  # looking took long
    with data_worker() as (worker, orders):
        burn_in(orders)
        if ends_before:
            worker.kill()
            worker.join()
        assert host.spent_s() >= 0.9 * BURNED_S
    assert host.spent_s() < 0.5 * BURNED_S


def as_worker(wait):
    Path("/proc/self/comm").write_text("pt_data_worker")  # as a worker of torch's DataLoader
    wait()


def test_data_workers_that_wait_for_a_lock_of_processes_are_counted():
    fork, shared, of_threads = multiprocessing.get_context("fork"), multiprocessing.Lock(), threading.Lock()
    host = Host()
    host.read()
    assert host.read(after_s=1000.0)["loader_lock_pct"] == 0
    with shared, of_threads:
        waits = (shared.acquire, shared.acquire, of_threads.acquire, partial(time.sleep, 600))
        workers = [fork.Process(target=as_worker, args=(wait,), daemon=True) for wait in waits]
        workers.append(fork.Process(target=shared.acquire, daemon=True))  # as an idle process of a pool
        try:
            for worker in workers:
                worker.start()
            until_s = time.monotonic() + 30
            while host.read(after_s=1000.0)["loader_lock_pct"] != 200 and time.monotonic() < until_s:
                time.sleep(0.05)
            assert host.read(after_s=1000.0)["loader_lock_pct"] == 200
        finally:
            for worker in workers:
                worker.kill()
                worker.join()


def work(orders):
    """A data worker."""
    orders.send("here")
    assert orders.recv() == "burn"
    until_s = time.process_time() + BURNED_S
    while time.process_time() < until_s:
        pass
    orders.send("done")
    orders.recv()


WORKING = Times(100, 1, 10, 500, 20, 2, 3, 4, 50, 0)


@pytest.mark.parametrize(
    ("after", "after_s", "shown"),
    [
        (
            WORKING._replace(user=114.5, system=10.8, idle=584.3, iowait=20.4),
            10.0,
            {"cpu_pct": 153.0, "iowait_pct": 0.4},
        ),
        (WORKING, 10.0, {}),  # counts nothing at all
        (WORKING._replace(user=101), 0.01, {}),
    ],
)
def test_the_whole_host_is_all_processes_and_its_memory(after, after_s, shown):
    """CPU time is absent at the first reading, after a moment, or where the system does not count it."""
    now_s = [0.0]
    source = WholeHostSource(now_s=lambda: now_s[0], machine=machines(WORKING, after))
    for expected in ({}, shown):
        ((gpu, values),) = source.read(slow=True)
        assert 0 < values.pop("mem_used_gib") < psutil.virtual_memory().total / 2**30
        assert (gpu, values) == (HOST, pytest.approx(expected))
        now_s[0] += after_s
    assert source.read(slow=False, edge=True) == []
