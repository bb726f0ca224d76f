import os
import subprocess
import sys
from dataclasses import replace

import pytest

from tests.fake_nvml.driver import NO_PERMISSION, FakeGpu, Scenario
from wellfed.monitor.processes import ProcessSource, rank_in
from wellfed.monitor.seen_gpus import find_gpus
from wellfed.observe.nvml.devices import Holder

TRAINING = (4711, 20.0, "/usr/bin/python3.12")
COMMAND = ["/usr/bin/python", "train.py", "", "--token", "abcdefghij"]
LISTS = "nvmlDeviceGetComputeRunningProcesses_v3"


class Named:
    """A source on a scenario, with its lines and processes."""

    def __init__(self, driver, **options):
        self.driver, self.lines, self.used_gib, self.kept = driver, [], {}, {}
        add = self.lines.append
        self.source = ProcessSource(find_gpus().gpus, self.used_gib.get, add, self.kept.__setitem__, **options)

    def after(self, gpu, *, used_gib, slow=True):
        """Returns the new lines after a reading with this memory in use."""
        self.used_gib[gpu], told = used_gib, len(self.lines)
        assert self.source.read(slow=slow) == []
        return self.lines[told:]


@pytest.fixture
def named(fake_driver):
    def begin(*gpus, **options):
        return Named(driver, ask=lambda holder: ({}, []), **options)

    with fake_driver.load(Scenario([FakeGpu("GPU-a", used_gib=21), FakeGpu("GPU-b")])) as driver:
        yield begin


def play(driver, *gpus):
    driver.switch(Scenario(list(gpus)))


def test_each_process_is_named_once(fake_driver):
    gpus = [FakeGpu("GPU-a", used_gib=21, processes=[TRAINING, (99, 0.5)]), FakeGpu("GPU-b")]
    with fake_driver.load(Scenario(gpus)) as driver:
        named = Named(driver, ask=lambda holder: ({"RANK": "3"}, COMMAND) if holder.pid == 4711 else ({}, []))
        named.source.begin()
        assert named.lines == [
            "GPU 0 is used by python3.12 (pid 4711, 20,480 MiB) rank 3: python train.py --token ***",
            "GPU 0 is used by a process (pid 99, 512 MiB)",
        ]
        assert [process.words for process in named.kept[0]] == [
            ["rank 3:", "python", "train.py", "--token", "***"],
            ["a process"],
        ]
        play(driver, replace(gpus[0], processes=[TRAINING, (100, 1.0, "/bin/\x1b[2Jevil")]), gpus[1])
        assert named.after(0, used_gib=24.0) == ["GPU 0 is used by \\x1b[2Jevil (pid 100, 1,024 MiB)"]
        assert [process.holder.pid for process in named.kept[0]] == [4711, 100]
        assert named.after(0, used_gib=25.0) == []


def test_the_list_is_asked_for_when_memory_has_changed_and_then_on_slow_rounds_only(named):
    on = named()
    on.source.begin()
    num_calls = on.driver.num_calls(LISTS)
    assert on.after(0, used_gib=21.1) == on.after(1, used_gib=0.0) == on.after(0, used_gib=30.0, slow=False) == []
    assert on.driver.num_calls(LISTS) == num_calls
    play(on.driver, FakeGpu("GPU-a", used_gib=30, processes=[TRAINING]), FakeGpu("GPU-b"))
    assert on.after(0, used_gib=30.0) == ["GPU 0 is used by python3.12 (pid 4711, 20,480 MiB)"]
    num_calls = on.driver.num_calls(LISTS)  # of this scenario
    assert num_calls > 0
    assert on.after(0, used_gib=30.1) == []
    assert on.driver.num_calls(LISTS) == num_calls
    assert on.driver.num_users() == 0
    on.source.close()


def test_a_driver_that_does_not_tell_costs_nothing(fake_driver):
    silent = FakeGpu("GPU-a", processes=[TRAINING], errors={LISTS: NO_PERMISSION})
    with fake_driver.load(Scenario([silent])) as driver:
        named = Named(driver)
        named.source.begin()
        assert named.after(0, used_gib=20.0) == []
        play(driver, FakeGpu("GPU-other"))
        assert named.after(0, used_gib=40.0) == []


@pytest.mark.parametrize(
    ("environ", "rank"),
    [
        ({"RANK": "3", "LOCAL_RANK": "1"}, "rank 3"),
        ({"SLURM_PROCID": "5"}, "rank 5"),
        ({"LOCAL_RANK": "1"}, "local rank 1"),
        ({"RANK": "", "LOCAL_RANK": "0"}, "local rank 0"),
        ({"RANK": "\x1b[31m"}, None),
        ({}, None),
    ],
)
def test_the_rank_is_what_a_launcher_has_told(environ, rank):
    assert rank_in(environ) == rank


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_rank_and_command_are_those_of_a_process_of_that_name():
    sleeping = [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)", "\x1b[2J", "api_key=abcdefghij"]
    with subprocess.Popen(sleeping, env={**os.environ, "RANK": "7"}, stdout=subprocess.PIPE) as process:
        process.stdout.readline()  # it is Python by now
        name = os.path.basename(os.path.realpath(sys.executable))
        source = ProcessSource([], lambda gpu: None, print)
        found = [source._process_of(Holder(process.pid, name, 1.0)) for name in (name, None, "another")]
        process.kill()
    assert [one.rank for one in found] == ["rank 7", "rank 7", None]
    assert found[0].command[0] == os.path.basename(sys.executable)
    assert found[0].command[-2:] == ("\\x1b[2J", "api_key='***'")
    assert found[2].command == ()
    gone = source._process_of(Holder(2**22 + 1, None, None))
    assert (gone.line, gone.memory_text) == (f"a process (pid {2**22 + 1}, size unknown)", "-")
