from types import SimpleNamespace

import psutil
import pytest

from wellfed.monitor.whole_host import WholeHostSource
from wellfed.observe.telemetry.machines import HOST
from wellfed.observe.telemetry.series import Reading


class ScriptedHost:
    """Gives these figures of this process and of the others."""

    def __init__(self, *values):
        self._values = list(values)

    def read(self, *, slow, edge=False):
        values = self._values.pop(0)
        return [] if values is None else [Reading(HOST, values)]


def source_of(*values):
    memory = SimpleNamespace(total=8 * 2**30, available=6 * 2**30)
    return WholeHostSource(host=ScriptedHost(*values), memory=lambda: memory)


def test_what_everybody_takes():
    ours = {"cpu_pct": 3.0, "rss_gib": 0.1, "loader_cpu_pct": 0.0, "others_cpu_pct": 150.0, "iowait_pct": 2.0}
    ((gpu, values),) = source_of(ours).read(slow=True)
    assert (gpu, values) == (HOST, {"cpu_pct": 153.0, "iowait_pct": 2.0, "mem_used_gib": 2.0})


@pytest.mark.parametrize("ours", [{"rss_gib": 0.1}, {"cpu_pct": 3.0, "rss_gib": 0.1}, None])
def test_memory_is_told_where_cpu_time_is_not(ours):
    """As at the first reading, or where the system does not count."""
    ((_, values),) = source_of(ours).read(slow=False)
    assert values == {"mem_used_gib": 2.0}


def test_at_an_edge_nothing_is_read():
    assert source_of().read(slow=False, edge=True) == []


def test_this_machine_tells():
    source = WholeHostSource()
    ((_, values),) = source.read(slow=True)
    assert 0 < values["mem_used_gib"] < psutil.virtual_memory().total / 2**30
    source.close()
