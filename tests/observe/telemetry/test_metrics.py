import itertools
from collections import namedtuple

from tests.fake_nvml.driver import Scenario
from tests.kit.watched import a100, h200
from wellfed.observe.nvml.gpm import FIGURES
from wellfed.observe.telemetry.host import HostSource
from wellfed.observe.telemetry.metrics import GPU_METRICS, HOST_METRICS, SLOW_METRICS, prefix
from wellfed.observe.telemetry.series import HOST


def test_the_table_has_what_a_fully_equipped_gpu_gives_and_nothing_else(watch):
    watched = watch(Scenario([h200()]))
    given = watched.read()[0] | watched.later()[0]
    assert set(given) == {*GPU_METRICS}


def test_the_table_has_what_the_host_gives_and_nothing_else():
    now_s = itertools.count()
    Times = namedtuple("Times", "user idle iowait")  # of a system that counts all
    machines = iter((Times(1, 2, 3), Times(2, 3, 4)))
    source = HostSource(now_s=lambda: float(next(now_s)), machine=lambda: next(machines))
    (first,), (second,) = source.read(slow=True), source.read(slow=True)
    assert {*first.values, *second.values} == {*HOST_METRICS}


def test_rates_are_those_at_which_figures_are_read(watch):
    watched = watch(Scenario([a100()]))
    watched.read()
    watched.later()
    watched.later()
    fast = {*GPU_METRICS} - SLOW_METRICS
    assert set(watched.later(1.0, slow=False)[0]) == fast - set(FIGURES)
    assert fast >= {"util_pct", "mem_used_gib"}


def test_prefixes():
    assert (prefix(0), prefix(11), prefix(HOST)) == ("gpu0", "gpu11", "host")
