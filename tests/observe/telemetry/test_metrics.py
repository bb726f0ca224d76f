import itertools
from collections import namedtuple

from tests.fake_nvml.driver import Scenario
from tests.kit.watched import a100, h200
from wellfed.observe.nvml.gpm import FIGURES
from wellfed.observe.telemetry.host import HostSource
from wellfed.observe.telemetry.machines import HOST
from wellfed.observe.telemetry.metrics import COLUMNS, GPU_METRICS, HOST_METRICS, METRICS, SLOW_S, prefix


def test_no_name_is_given_twice():
    names = [metric.name for metric in METRICS]
    assert len(names) == len(set(names))
    assert set(FIGURES) <= set(names)


def test_the_table_has_what_a_fully_equipped_gpu_gives_and_nothing_else(watch):
    watched = watch(Scenario([h200()]))
    given = watched.read()[0] | watched.later()[0]
    assert set(given) == {metric.name for metric in GPU_METRICS}


def test_the_table_has_what_the_host_gives_and_nothing_else():
    now_s = itertools.count()
    Times = namedtuple("Times", "user idle iowait")  # of a system that counts all
    machines = iter((Times(1, 2, 3), Times(2, 3, 4)))
    source = HostSource(now_s=lambda: float(next(now_s)), machine=lambda: next(machines))
    (first,), (second,) = source.read(slow=True), source.read(slow=True)
    assert {*first.values, *second.values} == {metric.name for metric in HOST_METRICS}


def test_rates_are_those_at_which_figures_are_read(watch):
    watched = watch(Scenario([a100()]))
    watched.read()
    watched.later()
    watched.later()
    fast = {metric.name for metric in GPU_METRICS if metric.rate == "fast"}
    assert set(watched.later(1.0, slow=False)[0]) == fast - set(FIGURES)
    assert fast >= {"util_pct", "mem_used_gib"}
    assert {metric.name for metric in HOST_METRICS if metric.rate == "slow"} == {"ram_available_gib"}
    assert SLOW_S == 5.0


def test_columns_of_the_file():
    assert COLUMNS[:4] == ("time_s", "step", "phase", "gpu")
    assert COLUMNS[4:] == tuple(metric.name for metric in METRICS)
    assert COLUMNS[-7:-4] == ("cpu_pct", "rss_gib", "loader_cpu_pct")
    assert COLUMNS[-4:] == ("loader_lock_pct", "others_cpu_pct", "iowait_pct", "ram_available_gib")


def test_prefixes():
    assert (prefix(0), prefix(11), prefix(HOST)) == ("gpu0", "gpu11", "host")
