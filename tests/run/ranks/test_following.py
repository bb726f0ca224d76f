"""How ranks get the run that rank 0 has composed, over a real store within one process."""

import json
import os
import pickle
import socket
import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from tests.run.ranks.processes import launch
from tests.run.ranks.test_exchange import Unreadable
from wellfed.config.compose import compose
from wellfed.errors import ConfigError
from wellfed.ranks import Launch
from wellfed.record import FILE_NAME, RunRecord
from wellfed.run.outcome import Outcome, RankEnded
from wellfed.run.ranks import following
from wellfed.run.ranks.exchange import Exchange
from wellfed.run.ranks.following import SharedRun, follow, invite, invited, lead, uninvite

GIT = {"commit": "0123456789ab", "dirty": False, "changed": [], "digest": ""}


def shared_in(folder, **more):
    return SharedRun(compose(["seed=7"]), None, folder, socket.gethostname(), 11, **more)


def followed(exchanges, folder, git=GIT):
    """What rank 0 refuses, and what the others follow or are told."""

    def attempt(exchange):
        try:
            return follow(exchange, lambda: git)
        except RankEnded as ended:
            return ended.outcome

    with ThreadPoolExecutor(2) as pool:
        found = [pool.submit(attempt, exchange) for exchange in exchanges[1:]]
        error = None
        try:
            lead(exchanges[0], shared_in(folder), GIT)
        except ConfigError as raised:
            error = str(raised)
            exchanges[0].outcomes.report(Outcome("invalid", 2))
        return error, [each.result() for each in found]


def test_all_follow_what_rank_0_has_composed_and_nothing_stays(exchanges, tmp_path):
    error, found = followed(exchanges, tmp_path)
    assert error is None
    for shared in found:
        assert (shared.composed.config.seed, shared.folder, shared.host) == (7, tmp_path, socket.gethostname())
    assert not list(tmp_path.iterdir())


def test_other_code_is_refused_before_anything_is_composed_there(exchanges, tmp_path):
    error, found = followed(exchanges, tmp_path, git={**GIT, "digest": "other"})
    assert "code: what is not committed differs between rank 0" in error
    assert [outcome.exit_code for outcome in found] == [2, 2]


@pytest.mark.slow
def test_the_code_of_a_machine_is_read_once(launcher, tmp_path):
    asked = []
    launches = [Launch("torchrun", rank, rank % 2, rank // 2, 4, 2, 2) for rank in range(4)]
    exchanges = [Exchange(each) for each in launches]
    with ThreadPoolExecutor(3) as pool:
        others = [pool.submit(follow, one, lambda: asked.append(1) or GIT) for one in exchanges[1:]]
        lead(exchanges[0], shared_in(tmp_path), GIT)
        assert [each.result().folder for each in others] == [tmp_path] * 3
    for exchange in reversed(exchanges):
        exchange.close()
    assert len(asked) == 1


def test_what_another_rank_can_not_read_is_reported_to_it(exchanges):
    def send(exchange):
        exchange.gather("code", None)
        exchange.broadcast("run", Unreadable())

    with ThreadPoolExecutor(3) as pool:
        pool.submit(send, exchanges[0])
        others = [pool.submit(follow, exchange, lambda: GIT) for exchange in exchanges[1:]]
        for each in others:
            assert "What rank 0 says can't be read on rank" in str(each.exception())
            assert "make it the same on all machines" in str(each.exception())


def test_a_folder_that_another_machine_does_not_see_is_named(exchanges, tmp_path, monkeypatch):
    monkeypatch.setattr(following, "SEEN_S", 0.1)
    mark_of = following._mark_of
    elsewhere = tmp_path / "elsewhere"
    written = []

    def of_each_machine(folder):  # rank 0 asks first, to write it; the other machines have another disk
        written.append(folder)
        return mark_of(folder if len(written) == 1 else elsewhere)

    monkeypatch.setattr(following, "_mark_of", of_each_machine)
    error, _ = followed(exchanges, tmp_path)
    where = f"{tmp_path}, on {socket.gethostname()}, is not there on"
    assert f"paths.log_dir: {where} node 1 ({socket.gethostname()}), node 2 ({socket.gethostname()})." in error
    assert not list(tmp_path.iterdir())


def test_a_folder_of_the_same_name_is_another(tmp_path, monkeypatch):
    monkeypatch.setattr(following, "SEEN_S", 0.1)
    shared = shared_in(tmp_path, mark="its mark")
    following._mark_of(tmp_path).write_text("of another run")
    assert not following._sees(shared)
    following._mark_of(tmp_path).write_text("its mark")
    assert following._sees(shared)


def test_a_composed_configuration_is_the_same_elsewhere():
    composed = compose(["workload=forecast", "trainer.max_steps=3"])
    there = pickle.loads(pickle.dumps(composed))
    assert there == composed
    assert there.yaml() == composed.yaml()


def test_ranks_of_lightning_find_the_run_by_a_file_that_this_user_alone_can_read(tmp_path, monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert invited() is None
    first = invite(shared_in(tmp_path), 2)
    (left,) = tmp_path.iterdir()
    assert stat.S_IMODE(left.stat().st_mode) == 0o600
    assert invited() is None  # this is rank 0
    monkeypatch.setenv("LOCAL_RANK", "1")
    second, shared = invited()
    assert (shared.composed.config.seed, shared.folder) == (7, tmp_path)
    first.broadcast("plan", "the plan")
    assert second.broadcast("plan") == "the plan"
    second.close()
    first.close()
    uninvite()
    assert not list(tmp_path.iterdir())
    assert invited() is None
    assert "WELLFED_RANK_0" not in os.environ


@pytest.mark.parametrize(
    ("status", "pid", "after"),
    [("running", 11, "failed"), ("running", 12, "running"), ("ok", 11, "ok")],
    ids=["its", "of another process", "over"],
)
def test_the_record_of_a_rank_0_that_is_gone_is_completed(tmp_path, capsys, status, pid, after):
    replace(RunRecord("mine"), status=status, pid=pid, host_name=socket.gethostname()).write(tmp_path)
    gone = Outcome("failed", 1, "code", "Rank 0 is gone without a report.", "Go on.")
    following._complete_record(launch(2, 4), shared_in(tmp_path), gone)
    record = json.loads((tmp_path / FILE_NAME).read_text())
    assert record["status"] == after
    if after == "failed":
        assert record["error"] == {"kind": "code", "message": gone.message, "advice": gone.advice}
        assert record["exit_code"] == 1
    assert capsys.readouterr().err == (f"{gone.message}\n{gone.advice}\n" if after == "failed" else "")
