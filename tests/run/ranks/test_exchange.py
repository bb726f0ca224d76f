"""Objects that ranks exchange by a real store of torch: in threads, and between processes that are killed."""

import os
import pickle
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from tests.kit.few import slow
from tests.run.ranks.processes import launch
from wellfed.errors import EXIT_FAILED, EXIT_NOTHING_RUN, ConfigError
from wellfed.run.outcome import OK, Outcome, RankEnded
from wellfed.run.ranks import exchange, rank_watch, store
from wellfed.run.ranks.exchange import Exchange

FAILED = Outcome("failed", EXIT_NOTHING_RUN, "data", "no such file", "Bring it.")
STOPPED = Outcome("interrupted", 143, None, "stopped by SIGTERM")


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
    on_all(exchanges, lambda one: one.all_gather("hello", None))
    return exchanges


def test_objects_reach_all_ranks_in_order(exchanges):
    def job(one):
        rank = one.launch.rank
        first = [one.broadcast("a", number if rank == 0 else None) for number in range(3)]
        return first, one.gather("b", {"rank": rank}), one.all_gather("c", rank), one.all_gather("c", -rank)

    found = on_all(exchanges, job)
    assert [each[0] for each in found] == [[0, 1, 2]] * 3
    assert [each[1] for each in found] == [[{"rank": 0}, {"rank": 1}, {"rank": 2}], [], []]
    assert [each[2:] for each in found] == [([0, 1, 2], [0, -1, -2])] * 3


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
    exchanges[1].outcomes.ask("set", "latest figures/1", b"of another run")
    assert exchanges[0].latest("figures") == [0, 2]


def test_what_a_killed_rank_has_left_stays(ranks):
    def first(exchange):
        exchange.all_gather("hello", None)
        with pytest.raises(RankEnded):
            exchange.gather("nothing", None)
        return exchange.latest("figures")

    def second(exchange):
        exchange.all_gather("hello", None)
        exchange.publish("figures", "the last")
        exchange.outcomes.ask("check", ["any"])  # the store has it
        os.kill(os.getpid(), signal.SIGKILL)

    for rank, job in enumerate((first, second)):
        ranks.start(launch(rank, 2, on_one_machine=True), job)
    assert ranks.result(0) == ["the last"]


def test_messages_are_handled_until_the_block_ends_though_one_fails(exchanges):
    joined(exchanges)
    handled = []

    def handle(content):
        if content == "bad":
            raise OSError("full")
        handled.append(content)

    with exchanges[0].receiving("readings", [1, 2], handle):
        for content in ("bad", 1, 2):
            exchanges[1].post("readings", content)
        exchanges[2].post("readings", 3)
    assert sorted(handled) == [1, 2, 3]
    assert handled.index(1) < handled.index(2)


def test_a_rank_that_waits_learns_how_another_has_ended(exchanges):
    joined(exchanges)
    exchanges[2].outcomes.report(FAILED)
    outcomes = raised_on_all(exchanges[:2], lambda one: one.all_gather("ready", None))
    for outcome in outcomes:
        assert outcome.message.startswith("Rank 2 on node 2 (")
        assert outcome.message.endswith("): no such file")


def test_a_rank_that_has_ended_well_is_not_waited_for(exchanges):
    joined(exchanges)
    exchanges[0].outcomes.report(OK)
    assert raised_on_all(exchanges[1:], lambda one: one.broadcast("run")) == [OK, OK]


class Unreadable:
    """Made by another version of the code."""

    def __reduce__(self):
        return int, ("no number",)


def test_what_can_not_be_read_leaves_nobody_waiting(exchanges):
    joined(exchanges)
    exchanges[1].gather("code", Unreadable())
    with pytest.raises(RankEnded, match="What rank 1 says can't be read on rank 0: invalid literal") as ended:
        exchanges[0].gather("code", None)
    assert "different versions of the code" in ended.value.outcome.advice


class Harmful:
    """Creates a file where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_what_no_rank_has_signed_is_not_unpickled(exchanges, tmp_path):
    joined(exchanges)
    (host,), port, _ = exchanges[0].address
    stranger = TCPStore(host, port, is_master=False, wait_for_workers=False)
    stranger.set("run/1", bytes(32) + pickle.dumps(Harmful(tmp_path / "harm")))
    with pytest.raises(RankEnded, match="it was signed by another run"):
        exchanges[1].broadcast("run")
    assert not (tmp_path / "harm").exists()


def test_ranks_that_do_not_come_are_named(launcher, monkeypatch):
    monkeypatch.setattr(exchange, "COME_S", 0.5)
    alone = Exchange(launch(0, 3))
    with pytest.raises(ConfigError, match="ranks 1, 2 of 3 did not come within 0 s: were they started"):
        alone.gather("code", None)
    alone.close()


def test_ranks_learn_that_rank_0_runs_nothing(exchanges):
    def job(one):
        if one.launch.rank == 0:
            one.close(Outcome("invalid", EXIT_NOTHING_RUN))
            return EXIT_NOTHING_RUN
        with pytest.raises(RankEnded) as raised:
            one.broadcast("run")
        return raised.value.outcome.exit_code

    assert on_all(exchanges, job) == [EXIT_NOTHING_RUN] * 3


def test_a_store_that_can_not_be_opened_is_reported(launcher, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "256.0.0.1")
    with pytest.raises(ConfigError, match=r"rank 1 of 3 can't meet the others at 256.0.0.1:"):
        store.find(launch(1, 3), 1)


def test_its_own_reason_counts_more_than_that_of_a_rank_that_lost_it(exchanges):
    joined(exchanges)
    lost = Outcome("failed", EXIT_FAILED, "code", "a connection is broken", is_of_other_rank=True)
    exchanges[1].outcomes.report(lost)
    threading.Timer(1, exchanges[2].outcomes.report, [FAILED]).start()
    assert exchanges[0].outcomes.reason(lost).message.endswith("no such file")


def test_a_failure_counts_more_than_the_stop_that_it_caused(exchanges):
    joined(exchanges)
    exchanges[1].outcomes.report(STOPPED)
    exchanges[2].outcomes.report(FAILED)
    assert exchanges[0].outcomes.reason(STOPPED).message.endswith("no such file")


def test_where_all_ranks_were_stopped_none_is_to_blame(exchanges):
    joined(exchanges)
    for one in exchanges[1:]:
        one.outcomes.report(STOPPED)
    assert exchanges[0].outcomes.reason(STOPPED).status == "interrupted"


def test_ranks_that_report_nothing_after_a_collective_has_failed_are_gone(exchanges, monkeypatch):
    joined(exchanges)
    monkeypatch.setattr(rank_watch, "REPORT_S", 0.5)
    lost = Outcome("failed", EXIT_FAILED, "code", "Connection closed by peer", is_of_other_rank=True)
    exchanges[1].outcomes.report(lost)
    assert exchanges[0].outcomes.reason(lost).message.startswith("Rank 2 on node 2 (")
    assert exchanges[0].outcomes.lost == {2}


# Processes


def wait(one):
    return one.broadcast("never") if one.launch.rank else one.gather("never", None)


def meet_and(job):
    """A job that begins when all ranks are there."""

    def begin(one):
        one.all_gather("hello", None)
        one.gather("met", None)  # rank 0 does not go before the others know
        return job(one)

    return begin


@pytest.mark.parametrize("on_one_machine", [True, slow(False)])  # False: as below
def test_a_rank_that_is_killed_is_found_and_named(ranks, monkeypatch, on_one_machine):
    monkeypatch.setattr(rank_watch, "GONE_S", 3.0)
    killed = meet_and(lambda one: os.kill(os.getpid(), signal.SIGKILL))
    for rank in range(3):
        which = launch(rank, 3, on_one_machine=on_one_machine)
        ranks.start(which, killed if rank == 1 else meet_and(wait))
    assert ranks.code(1) == -signal.SIGKILL
    for rank in (0, 2):
        message = ranks.result(rank)
        assert message.startswith("Rank 1 is gone" if on_one_machine else "Rank 1 on node 1 (")
        assert "is gone without a report: it was killed, or its machine is gone." in message


def test_a_machine_that_gives_no_sign_of_life_is_gone(ranks, monkeypatch):
    monkeypatch.setattr(rank_watch, "GONE_S", 2.0)
    stops = meet_and(lambda one: os.kill(os.getpid(), signal.SIGSTOP))
    for rank in range(2):
        ranks.start(launch(rank, 2), stops if rank else meet_and(wait))
    assert ranks.result(0).startswith("Rank 1 on node 1 (")


@pytest.mark.slow
def test_a_rank_that_was_stopped_for_a_while_is_not_gone(ranks, monkeypatch):
    def job(one):
        if one.launch.rank:
            time.sleep(4)
        return one.all_gather("ready", one.launch.rank)

    for rank in range(2):
        ranks.start(launch(rank, 2), meet_and(job))
    time.sleep(1.5)
    ranks.signal(1, signal.SIGSTOP)
    time.sleep(2)
    ranks.signal(1, signal.SIGCONT)
    assert [ranks.result(rank) for rank in range(2)] == [[0, 1]] * 2


def test_that_rank_0_is_killed_is_noticed_once(ranks, tmp_path):
    def job(one):
        if one.launch.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        noticed = []
        one.outcomes.on_rank_0_gone = noticed.append
        try:
            wait(one)
        except RankEnded as ended:
            return str(ended), [outcome.message for outcome in noticed], one.outcomes.lost

    for rank in range(3):
        ranks.start(launch(rank, 3), meet_and(job))
    for rank in (1, 2):
        said, noticed, lost = ranks.result(rank)
        assert said.startswith("Rank 0 on node 0 (")
        assert (noticed, lost) == ([said], {0})


@pytest.mark.slow
def test_the_record_of_a_rank_0_that_is_gone_is_written_before_another_rank_ends(ranks, tmp_path):
    def job(one):
        if one.launch.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)

        def write(outcome):
            time.sleep(1)
            (tmp_path / "record").write_text(outcome.message)

        one.outcomes.on_rank_0_gone = write
        while 0 not in one.outcomes.lost:
            time.sleep(0.01)

    for rank in range(2):
        ranks.start(launch(rank, 2), meet_and(job))
    assert ranks.code(1) == 0
    assert (tmp_path / "record").read_text().startswith("Rank 0 on node 0 (")


def test_a_rank_that_hangs_when_another_fails_is_ended_after_its_record(ranks, monkeypatch, tmp_path):
    monkeypatch.setattr(rank_watch, "GRACE_S", 0.5)

    def job(one):
        if one.launch.rank == 1:
            one.outcomes.report(replace(FAILED, exit_code=3))
            return
        with one.outcomes.watching(lambda outcome: (tmp_path / f"record{one.launch.rank}").write_text(outcome.message)):
            time.sleep(50)

    for rank in range(3):
        ranks.start(launch(rank, 3), meet_and(job))
    assert [ranks.code(0), ranks.code(2)] == [3, 3]
    assert (tmp_path / "record0").read_text().endswith("no such file")


@pytest.mark.slow
def test_others_do_not_wait_for_the_record_of_rank_0(ranks, monkeypatch):
    monkeypatch.setattr(rank_watch, "GRACE_S", 0.5)
    monkeypatch.setattr(rank_watch, "LAST_RECORD_S", 8.0)

    def job(one):
        if one.launch.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        began_s = time.monotonic()
        with one.outcomes.watching(lambda outcome: time.sleep(20) if one.launch.rank == 0 else None):
            wait(one) if one.launch.rank else time.sleep(50)
        return time.monotonic() - began_s

    monkeypatch.setattr(rank_watch, "GONE_S", 2.0)
    for rank in range(3):
        ranks.start(launch(rank, 3), meet_and(job))
    assert "Rank 1 on node 1" in ranks.result(2)
    assert ranks.code(0) == EXIT_FAILED


@pytest.mark.slow
def test_a_stop_of_all_ranks_ends_none_that_writes_its_checkpoint(ranks, monkeypatch):
    monkeypatch.setattr(rank_watch, "GRACE_S", 0.2)

    def job(one):
        if one.launch.rank == 1:
            one.outcomes.report(replace(STOPPED, is_of_all=True))
            return None
        with one.outcomes.watching(lambda outcome: None):
            time.sleep(3)
        return one.outcomes.failure().status

    for rank in range(2):
        ranks.start(launch(rank, 2), meet_and(job))
    assert ranks.result(0) == "interrupted"


@pytest.mark.slow
def test_a_rank_that_ends_by_itself_is_left_to_it(ranks, monkeypatch):
    monkeypatch.setattr(rank_watch, "GRACE_S", 1.5)

    def job(one):
        if one.launch.rank == 1:
            one.outcomes.report(FAILED)
            return None
        with pytest.raises(RankEnded), one.outcomes.watching(lambda outcome: None):
            wait(one)
        time.sleep(2.5)
        return "ended by itself"

    for rank in range(2):
        ranks.start(launch(rank, 2), meet_and(job))
    assert ranks.result(0) == "ended by itself"


def test_a_rank_may_open_as_many_files_as_the_others_need():
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert hard == resource.RLIM_INFINITY or hard > 300
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        store.allow_open_files(300)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (300, hard)
        store.allow_open_files(200)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (300, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
