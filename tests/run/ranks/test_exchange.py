"""Objects that ranks exchange by a real store of torch, in threads of one process."""

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from tests.kit.composed import compose
from tests.run.ranks.conftest import launch
from wellfed.errors import EXIT_FAILED, EXIT_NOTHING_RUN, ConfigError
from wellfed.ranks import lightnings_launch
from wellfed.run.outcome import OK, Outcome, RankEnded
from wellfed.run.ranks import coordination, exchange
from wellfed.run.ranks.coordination import OtherRanks, SharedRun, invited
from wellfed.run.ranks.exchange import Exchange

FAILED = Outcome("failed", EXIT_NOTHING_RUN, "data", "no such file", "Bring it.")
STOPPED = Outcome("interrupted", 143, None, "stopped by SIGTERM")


def shared_in(folder):
    return SharedRun(compose(["seed=7"]), None, folder)


def on_all(exchanges, job):
    """What a job returns on each rank."""
    with ThreadPoolExecutor(len(exchanges)) as pool:
        return list(pool.map(job, exchanges))


def raised_on_all(exchanges, job):
    def attempt(one):
        with pytest.raises(RankEnded) as raised:
            job(one)
        return raised.value.outcome

    return on_all(exchanges, attempt)


def joined(exchanges):
    on_all(exchanges, lambda one: one.meet("hello"))
    return exchanges


def test_objects_reach_all_ranks_in_order(exchanges):
    def job(one):
        rank = one.launch.rank
        first = [one.broadcast(f"a{number}", number if rank == 0 else None) for number in range(3)]
        one.meet("here")
        return first, one.gather("b", {"rank": rank})

    found = on_all(exchanges, job)
    assert [each[0] for each in found] == [[0, 1, 2]] * 3
    assert [each[1] for each in found] == [[{"rank": 0}, {"rank": 1}, {"rank": 2}], [], []]


def test_the_latest_object_of_each_rank_is_read_without_waiting(exchanges):
    joined(exchanges)
    assert exchanges[0].latest("figures") == []
    for number in (1, 2):
        exchanges[2].publish("figures", number)
    exchanges[0].publish("figures", 0)
    until_s = time.monotonic() + 20
    while exchanges[0].latest("figures") != [0, 2] and time.monotonic() < until_s:
        time.sleep(0.01)
    assert exchanges[0].latest("figures") == [0, 2]


def test_ranks_that_never_come_are_named(launcher, monkeypatch):
    monkeypatch.setattr(exchange, "COME_S", 1.0)
    first, second = (Exchange(launch(rank, 4)) for rank in (0, 1))
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(one.meet, "training") for one in (first, second)]
        with pytest.raises(ConfigError, match=r"torchrun: ranks 2, 3 of 4 did not come within 1 s\."):
            waiting[0].result(timeout=30)
        first.report(FAILED)
        with pytest.raises(RankEnded):
            waiting[1].result(timeout=30)
    first.close()


def test_a_rank_that_waits_learns_how_another_has_ended(exchanges):
    joined(exchanges)
    exchanges[2].report(FAILED)
    for outcome in raised_on_all(exchanges[:2], lambda one: one.meet("ready")):
        assert outcome.message.startswith("Rank 2 on node 2 (")
        assert outcome.message.endswith("): no such file")


def test_a_rank_that_has_ended_well_is_not_waited_for(exchanges):
    joined(exchanges)
    exchanges[0].report(OK)
    assert raised_on_all(exchanges[1:], lambda one: one.broadcast("run")) == [OK, OK]


@pytest.mark.slow
def test_ranks_learn_that_rank_0_runs_nothing(exchanges):
    def job(one):
        if one.launch.rank == 0:
            one.close(Outcome("invalid", EXIT_NOTHING_RUN))
            return EXIT_NOTHING_RUN
        with pytest.raises(RankEnded) as raised:
            one.broadcast("run")
        one.report(raised.value.outcome)
        return raised.value.outcome.exit_code

    assert on_all(exchanges, job) == [EXIT_NOTHING_RUN] * 3


@pytest.mark.slow
def test_a_rank_that_came_learns_of_a_refusal_though_others_did_not_come(launcher, monkeypatch):
    monkeypatch.setattr(exchange, "REFUSED_S", 0.5)
    first, second = (Exchange(launch(rank, 3)) for rank in range(2))

    def job(one):
        if one is first:
            one.close(Outcome("invalid", EXIT_NOTHING_RUN))
            return EXIT_NOTHING_RUN
        with pytest.raises(RankEnded) as raised:
            one.broadcast("run")
        return raised.value.outcome.exit_code

    assert on_all([first, second], job) == [EXIT_NOTHING_RUN] * 2
    second.close()


def test_that_rank_0_is_gone_is_an_end_of_the_others(exchanges):
    joined(exchanges)

    class Gone:
        def check(self, keys):
            raise RuntimeError("Connection reset by peer")

    exchanges[1]._store = Gone()
    with pytest.raises(RankEnded, match="Rank 0 is gone"):
        exchanges[1].broadcast("plan")
    exchanges[1]._store = None  # nothing is reported at its end


@pytest.mark.parametrize("own", [STOPPED, Outcome("failed", EXIT_FAILED, "code", "broken", is_of_other_rank=True)])
def test_a_failure_of_its_own_counts_more_than_what_it_caused(exchanges, own):
    joined(exchanges)
    exchanges[1].report(own)
    threading.Timer(0.5, exchanges[2].report, [FAILED]).start()
    assert exchanges[0].reason().message.endswith("no such file")


def test_rank_0_of_lightning_does_not_wait_until_it_is_killed(exchanges):
    joined(exchanges)
    exchanges[0].launch = lightnings_launch(0, 3)
    began_s = time.monotonic()
    assert exchanges[0].reason() is None
    assert time.monotonic() - began_s < 3


def test_ranks_that_lightning_starts_get_run_and_plan(tmp_path, monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert invited() is None
    others, plan = OtherRanks(0, shared_in(tmp_path)), SimpleNamespace(trainer=SimpleNamespace(world_size=2))
    assert others.plan(SimpleNamespace(for_training=lambda rank: plan)) is plan
    assert invited() is None  # this is rank 0
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(coordination, "die_with_parent", lambda parent: None)
    second = invited()
    shared = second.broadcast("run")
    assert (shared.composed.config.seed, shared.folder) == (7, tmp_path)
    assert OtherRanks(1, shared, second).plan(None) == plan
    second.close()
    others.close(0)
    assert invited() is None
    assert "WELLFED_RANK_0" not in os.environ


ORPHAN = """
import os, subprocess, sys, time
from wellfed.run.ranks import coordination
if "child" in sys.argv:
    coordination.invited()
    time.sleep(60)
else:
    child = subprocess.Popen([sys.executable, sys.argv[0], "child"], env={**os.environ, "LOCAL_RANK": "1",
                             "WELLFED_RANK_0": "1/2"})
    print(child.pid, flush=True)
    time.sleep(2)
"""


@pytest.mark.slow
def test_a_rank_of_lightning_ends_with_rank_0(tmp_path):
    (tmp_path / "orphan.py").write_text(ORPHAN)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, tmp_path / "orphan.py"], env=environment, stdout=-1, text=True, check=True)
    until_s = time.monotonic() + 20
    while os.path.exists(f"/proc/{done.stdout.strip()}"):
        assert time.monotonic() < until_s
        time.sleep(0.1)
