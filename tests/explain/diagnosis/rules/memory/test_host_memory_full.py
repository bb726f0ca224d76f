"""Host memory that is full."""

from dataclasses import replace

import numpy as np

from tests.kit.loader_evidence import fed_by
from wellfed.explain.diagnosis.rules.memory_rules import device_memory_full
from wellfed.explain.diagnosis.rules.memory_rules import host_memory_full as check
from wellfed.explain.diagnosis.run_rules import run_rules
from wellfed.observe.telemetry.series import HOST

MACHINE = {"cpu_quota_cores": 8.0, "ram_gib": 16.0, "shm_gib": 8.0}
KILLED = {"kind": "worker", "message": "A worker was killed.", "advice": ""}


def test_a_killed_worker_is_told_of_however_few_steps():
    loader, loading = {"prefetch_factor": 4}, {"batch_mib": 64.0}
    run = fed_by(8, build_ms=5.0, error=KILLED, machine=MACHINE, steps=5, loader=loader, loading=loading)
    found = run_rules(run)[0]
    assert found.id == "host_memory_full"
    assert "32 batches are kept ready by 8 workers, 2.0 GiB" in found.message
    assert found.change == ("loader.num_workers=4", "loader.prefetch_factor=2")
    assert found.severity == "high"


def test_memory_that_grew_with_every_step_has_no_advice_but_that_of_its_error():
    error = {"kind": "host_oom", "message": "Memory grew with every step, by 11 MiB a step.", "advice": ""}
    run = fed_by(1, build_ms=5.0, machine=MACHINE, host={"rss_gib": 15.0}, error=error)
    assert check(run) is None
    run = fed_by(1, build_ms=5.0, machine=MACHINE, status="oom", error={**error, "kind": "device_oom"})
    assert device_memory_full(run) is None


def test_memory_that_is_nearly_full_is_told():
    assert "15.00 GiB of 16.00 GiB" in check(fed_by(2, build_ms=5.0, machine=MACHINE, host={"rss_gib": 15.0})).message


def test_room_and_other_errors_are_no_finding():
    other = {"kind": "code", "message": "", "advice": ""}
    assert check(fed_by(2, build_ms=5.0, machine=MACHINE, host={"rss_gib": 4.0}, error=other)) is None


def forked(rss_gib, available_gib=None, **more):
    """A run of eight workers whose processes have this much memory in sum, with the least that was left."""
    run = fed_by(8, build_ms=5.0, machine=MACHINE, host={"rss_gib": 2.5}, **more)
    left = {} if available_gib is None else {"ram_available_gib": np.array([14.0, np.nan, available_gib])}
    return replace(run, curves={HOST: {"rss_gib": np.array([1.0, rss_gib, 2.0]), **left}})


def test_pages_that_forked_workers_share_do_not_fill_the_memory():
    assert check(forked(22.5, available_gib=13.0)) is None
    assert check(forked(22.5)) is None  # of an earlier version, which recorded no memory left
    assert "All programs held 15.50 GiB of 16.00 GiB" in check(forked(22.5, available_gib=0.5)).message


def test_other_programs_that_fill_the_memory_are_not_the_run():
    assert check(forked(3.0, available_gib=0.5)) is None


def test_a_run_that_holds_less_than_all_programs_is_named():
    assert "The run held 14.80 GiB of 16.00 GiB" in check(forked(14.8, available_gib=0.5)).message
