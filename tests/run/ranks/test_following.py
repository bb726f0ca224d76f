"""What rank 0 tells the ranks that torchrun or srun has started, over connections within one process."""

import json
import pickle
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from tests.run.ranks.test_line import Unreadable, connected, lines, meeting_place  # noqa: F401
from wellfed.config.compose import compose
from wellfed.errors import EXIT_FAILED, ConfigError
from wellfed.ranks import Launch
from wellfed.record import FILE_NAME, RunRecord
from wellfed.run.ending import Outcome, RankEnded
from wellfed.run.ranks import following
from wellfed.run.ranks import line as module
from wellfed.run.ranks.following import Word, lead

GIT = {"commit": "0123456789ab", "dirty": False, "diff": ""}


def followed(lines, folder, own=lambda facts: facts, sees=lambda line, word: following._sees(word)):  # noqa: F811
    """What rank 0's `lead` raises or gives, and what the others heard."""

    def follow(line):
        line.tell("code", own(following._facts(line.launch, GIT)))
        word = line.hear("word")
        line.tell("sees", None if sees(line, word) else f"node {line.launch.node}")
        return word

    with ThreadPoolExecutor(2) as pool:
        words = [pool.submit(follow, line) for line in lines[1:]]
        try:
            lead(lines[0], compose(["seed=7"]), None, folder, GIT)
        except ConfigError as error:
            lines[0].end(Outcome("invalid", 2))
            return str(error), words
        return None, words


def test_all_have_what_rank_0_has_composed_and_nothing_stays(lines, tmp_path):  # noqa: F811
    error, words = followed(lines, tmp_path)
    assert error is None
    for word in (each.result() for each in words):
        assert (word.composed.config.seed, word.folder, word.host) == (7, tmp_path, socket.gethostname())
    assert not list(tmp_path.iterdir())


def test_other_code_is_told_before_anything_is_composed_there(lines, tmp_path):  # noqa: F811
    error, words = followed(lines, tmp_path, own=lambda facts: replace(facts, change="other"))
    assert "code: what is not committed differs between rank 0" in error
    assert all(word.exception() is not None for word in words)


def test_the_code_of_a_machine_is_looked_at_once(meeting_place, monkeypatch, tmp_path):  # noqa: F811
    asked, trained = [], []
    monkeypatch.setattr(module, "_meet_at", lambda address, port: None)
    monkeypatch.setattr(following, "spin_less", lambda environ: None)
    monkeypatch.setattr(following, "own_git_state", lambda: asked.append(1) or GIT)
    monkeypatch.setattr(following, "train", lambda composed, line, word: trained.append(line.launch.rank) or 0)
    launches = [Launch("torchrun", rank, rank % 2, rank // 2, 4, 2, 2) for rank in range(4)]
    with connected(*launches) as made, ThreadPoolExecutor(3) as pool:
        others = [pool.submit(following.follow, line) for line in made[1:]]
        lead(made[0], compose(), None, tmp_path, GIT)
        assert [each.result() for each in others] == [0, 0, 0]
    assert (len(asked), sorted(trained)) == (1, [1, 2, 3])


def test_words_that_another_rank_can_not_read_are_told_by_rank_0(lines, monkeypatch):  # noqa: F811
    monkeypatch.setattr(following, "spin_less", lambda environ: None)
    monkeypatch.setattr(following, "own_git_state", lambda: GIT)
    lines[0].tell("word", Unreadable())
    assert following.follow(lines[1]) == EXIT_FAILED
    with pytest.raises(RankEnded) as ended:
        lines[0].gather("sees", None)
    assert str(ended.value).startswith("Rank 1 on node 1 (")
    assert "What rank 0 says can't be read on rank 1: invalid literal" in str(ended.value)
    assert "make it the same on all machines" in str(ended.value)


def test_a_folder_that_another_machine_does_not_see_is_told(lines, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr(following, "SEEN_S", 0.1)

    def sees(line, word):
        is_far = line.launch.node == 2
        return following._sees(replace(word, folder=tmp_path / "its own" if is_far else word.folder))

    error, _ = followed(lines, tmp_path, sees=sees)
    assert f"paths.log_dir: {tmp_path}, on {socket.gethostname()}, is not there on node 2." in error
    assert not list(tmp_path.iterdir())


def test_a_folder_of_the_same_name_is_another(tmp_path, monkeypatch):
    monkeypatch.setattr(following, "SEEN_S", 0.1)
    word = Word(compose(), None, tmp_path, "its mark", "a", 1)
    following._mark_of(tmp_path).write_text("of another run")
    assert not following._sees(word)
    following._mark_of(tmp_path).write_text("its mark")
    assert following._sees(word)


def test_a_composed_configuration_is_the_same_elsewhere():
    composed = compose(["workload=forecast", "trainer.max_steps=3"])
    there = pickle.loads(pickle.dumps(composed))
    assert there == composed
    assert there.yaml() == composed.yaml()


@pytest.mark.parametrize(
    ("status", "pid", "after"),
    [("running", 11, "failed"), ("running", 12, "running"), ("ok", 11, "ok")],
    ids=["its", "of another process", "over"],
)
def test_the_record_of_a_rank_0_that_is_gone_is_completed(tmp_path, capsys, status, pid, after):
    replace(RunRecord("mine"), status=status, pid=pid, host_name="a").write(tmp_path)
    gone = Outcome("failed", 1, "code", "Rank 0 is gone without a word.", "Go on.")
    word = Word(compose(), None, tmp_path, "", "a", 11)
    following._rank_0_is_gone(Launch("torchrun", 2, 0, 1, 4, 2, 2), word, gone)
    record = json.loads((tmp_path / FILE_NAME).read_text())
    assert record["status"] == after
    if after == "failed":
        assert record["error"] == {"kind": "code", "message": gone.message, "advice": gone.advice}
        assert record["exit_code"] == 1
    assert capsys.readouterr().err == f"{gone.message}\n{gone.advice}\n"
