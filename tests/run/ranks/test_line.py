"""Connections between ranks: real ones, of two or three in one process."""

import errno
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection

import pytest

from wellfed.errors import EXIT_FAILED, EXIT_NOTHING_RUN, ConfigError
from wellfed.ranks import Launch
from wellfed.run.ending import OK, Outcome, RankEnded
from wellfed.run.ranks import line as module
from wellfed.run.ranks.line import Line

FAILED = Outcome("failed", EXIT_NOTHING_RUN, "data", "no such file", "Bring it.")


@pytest.fixture
def meeting_place(monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MASTER_PORT", str(free.getsockname()[1]))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")  # and so put back afterwards


@contextmanager
def connected(*launches):
    """Lines of these ranks."""
    made = [Line(launch) for launch in launches]
    with ThreadPoolExecutor(len(made)) as pool:
        told = [pool.submit(line.gather, "hello", line.launch.rank) for line in made]
        assert [each.result() for each in told] == [list(range(len(made))), *([] for _ in made[1:])]
    try:
        yield made
    finally:
        for line in reversed(made):
            line.close()


@pytest.fixture
def lines(meeting_place, monkeypatch):
    """Of three ranks on as many machines, connected."""
    monkeypatch.setattr(module, "_meet_at", lambda address, port: None)  # they have one environment here
    with connected(*(Launch("torchrun", rank, 0, rank, 3, 3, 1) for rank in range(3))) as made:
        yield made


def cut(line):
    """As the kernel does it for a process that was killed."""
    with socket.socket(fileno=line._peers[0].connection.fileno()) as open_socket:
        open_socket.shutdown(socket.SHUT_RDWR)
        open_socket.detach()


def test_what_rank_0_tells_all_hear_in_order(lines):
    for number in range(3):
        lines[0].tell("word", number)
    lines[0].tell("other", "x")
    for line in lines[1:]:
        assert line.hear("other") == "x"
        assert [line.hear("word") for _ in range(3)] == [0, 1, 2]


class Composed:
    """Counts how often it is pickled."""

    times = 0

    def __reduce__(self):
        type(self).times += 1
        return str, ("composed",)


def test_what_all_are_told_is_pickled_once(lines):
    lines[0].tell("word", Composed())
    assert [line.hear("word") for line in lines[1:]] == ["composed", "composed"]
    assert Composed.times == 1


def test_a_handler_gets_what_ranks_tell(lines):
    heard, is_complete = [], threading.Event()

    def take(rank, content):
        heard.append((rank, content))
        if len(heard) == 2:
            is_complete.set()

    lines[0].on("telemetry", take)
    lines[1].tell("telemetry", {"util_pct": 50.0})
    lines[2].tell("telemetry", {"util_pct": 60.0})
    assert is_complete.wait(10)
    assert sorted(heard, key=lambda one: one[0]) == [(1, {"util_pct": 50.0}), (2, {"util_pct": 60.0})]


def test_that_a_rank_is_gone_is_heard_while_a_handler_writes(lines):
    """To a disk that is full, say, or to a logger that does not answer."""
    is_writing, may_go_on = threading.Event(), threading.Event()
    heard = []

    def write(rank, content):
        is_writing.set()
        may_go_on.wait(30)
        heard.append(content)

    lines[0].on("telemetry", write)
    lines[1].tell("telemetry", 1)
    lines[1].tell("telemetry", 2)
    assert is_writing.wait(10)
    cut(lines[2])
    assert "Rank 2 on node 2" in lines[0].reason(wait_s=10).message
    assert heard == []
    may_go_on.set()


def test_a_handler_that_fails_gets_what_comes_next(lines):
    heard, is_complete = [], threading.Event()

    def take(rank, content):
        heard.append(content)
        if content == 1:
            raise OSError("full")
        is_complete.set()

    lines[0].on("telemetry", take)
    lines[1].tell("telemetry", 1)
    lines[1].tell("telemetry", 2)
    assert is_complete.wait(10)
    assert heard == [1, 2]


def test_who_waits_for_a_rank_learns_how_it_has_ended(lines):
    lines[2].end(FAILED)
    with pytest.raises(RankEnded) as raised:
        lines[0].gather("ready", None)
    assert raised.value.outcome.message.endswith("): no such file")
    assert raised.value.outcome.message.startswith("Rank 2 on node 2 (")
    lines[0].end(raised.value.outcome)
    with pytest.raises(RankEnded):
        lines[1].hear("go")


def test_a_rank_that_has_ended_well_is_not_waited_for(lines):
    lines[0].end(OK)
    with pytest.raises(RankEnded) as raised:
        lines[1].hear("word")
    assert raised.value.outcome == OK


def test_a_rank_that_is_gone_without_a_word_is_noticed_at_once(lines):
    gone = threading.Event()
    lines[0].on_gone = lambda rank, outcome: gone.set()
    cut(lines[1])
    assert gone.wait(10)
    assert lines[0].is_broken
    assert "Rank 1 on node 1" in lines[0].reason(0).message
    assert not lines[2].is_broken


class Unreadable:
    """Made by another version of the code."""

    def __reduce__(self):
        return int, ("no number",)


def test_words_that_can_not_be_read_leave_nobody_waiting(lines):
    lines[1].tell("word", Unreadable())
    with pytest.raises(RankEnded, match="What rank 1 says can't be read on rank 0: invalid literal") as ended:
        lines[0].hear("word", 1)
    assert "different versions of the code" in ended.value.outcome.advice


def test_its_own_reason_counts_more_than_that_of_a_rank_that_lost_it(lines):
    lines[1].end(replace(FAILED, message="a connection is broken", is_of_other_rank=True))
    assert lines[0].reason(wait_s=0.2) is None
    lines[2].end(FAILED)
    assert lines[0].reason(wait_s=10).message.endswith("no such file")


def test_a_rank_that_hangs_when_another_is_gone_is_ended_after_its_last_words(lines, monkeypatch):
    codes, said = [], []
    is_over = threading.Event()
    monkeypatch.setattr(module, "GRACE_S", 0.2)
    monkeypatch.setattr(module.os, "_exit", lambda code: (codes.append(code), is_over.set()))
    with lines[0].watching(said.append):
        cut(lines[1])
        assert is_over.wait(10)
    assert codes == [EXIT_FAILED]
    assert "is gone without a word" in said[0].message
    with pytest.raises(RankEnded):  # the others are told
        lines[2].hear("go")


def test_others_do_not_wait_for_the_last_words_of_rank_0(lines, monkeypatch):
    """Nor for its own time of grace: no other notices that a machine is gone."""
    is_over, are_said = threading.Event(), threading.Event()
    monkeypatch.setattr(module, "GRACE_S", 0.1)
    monkeypatch.setattr(module, "LAST_WORDS_S", 30)
    monkeypatch.setattr(module.os, "_exit", lambda code: is_over.set())
    with lines[0].watching(lambda outcome: are_said.wait(30)):
        cut(lines[1])
        told = lines[2].reason(wait_s=10)
        are_said.set()
        assert is_over.wait(10)
    assert "Rank 1 on node 1" in told.message


def test_a_stop_of_all_ranks_is_no_reason_to_end_one_that_writes_its_checkpoint(lines, monkeypatch):
    monkeypatch.setattr(module, "GRACE_S", 0.1)
    monkeypatch.setattr(module.os, "_exit", lambda code: pytest.fail("was ended"))
    stopped = Outcome("interrupted", 143, None, "stopped by SIGTERM", is_of_all=True)
    with lines[0].watching(lambda outcome: None):
        lines[1].end(stopped)
        assert lines[0].reason(wait_s=10).status == "interrupted"
        assert not threading.Event().wait(0.4)


def test_one_that_waits_for_a_rank_that_was_stopped_alone_is_ended(lines, monkeypatch):
    codes, is_over = [], threading.Event()
    monkeypatch.setattr(module, "GRACE_S", 0.1)
    monkeypatch.setattr(module.os, "_exit", lambda code: (codes.append(code), is_over.set()))
    with lines[0].watching(lambda outcome: None):
        lines[1].end(Outcome("interrupted", 143, None, "stopped by SIGTERM"))
        assert is_over.wait(10)
    assert codes == [143]


def test_that_a_rank_failed_counts_more_than_that_others_were_stopped_for_it(lines):
    lines[1].end(Outcome("interrupted", 143, None, "stopped by SIGTERM"))
    assert lines[0].reason(wait_s=10).status == "interrupted"
    gone = threading.Event()
    lines[0].on_gone = lambda rank, outcome: gone.set()
    cut(lines[2])
    assert gone.wait(10)
    with pytest.raises(RankEnded, match="Rank 2 on node 2"):
        lines[0].hear("go", 2)


def test_a_store_that_can_not_be_opened_is_told(meeting_place, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "256.0.0.1")
    with pytest.raises(ConfigError, match="rank 1 of 2 can't meet the others at 256.0.0.1:"):
        module._store(Launch("torchrun", 1, 0, 0, 2, 1, 2), 2)


def test_one_that_ends_by_itself_is_left_to_it(lines, monkeypatch):
    monkeypatch.setattr(module, "GRACE_S", 0.2)
    monkeypatch.setattr(module.os, "_exit", lambda code: pytest.fail("was ended"))
    gone = threading.Event()
    lines[0].on_gone = lambda rank, outcome: gone.set()
    with lines[0].watching(lambda outcome: None):
        cut(lines[1])
        assert gone.wait(10)
    assert not threading.Event().wait(0.5)


def test_ranks_that_do_not_come_are_named(meeting_place, monkeypatch):
    monkeypatch.setattr(module, "COME_S", 0.5)
    line = Line(Launch("torchrun", 0, 0, 0, 3, 3, 1))
    with pytest.raises(ConfigError, match="ranks 1, 2 of 3 did not come within 0 s"):
        line.gather("hello", None)
    line.close()


def test_a_stranger_does_not_get_in(meeting_place, monkeypatch):
    """Though it knows what ranks say when they come."""
    monkeypatch.setattr(module, "_meet_at", lambda address, port: None)
    two = [Line(Launch("torchrun", rank, 0, 0, 2, 1, 2)) for rank in range(2)]
    connecting = threading.Thread(target=two[0].gather, args=["hello", 0])
    connecting.start()
    store, _ = module._store(two[1].launch, 10)
    store.wait(["line"])
    addresses, port, *_ = module.ast.literal_eval(store.get("line").decode())
    with socket.create_connection((addresses[0], port)) as opened:
        stranger = Connection(opened.detach())
        assert stranger.poll(10)  # the challenge
        stranger.recv_bytes()
        stranger.send((1, 0, "stranger"))
        with pytest.raises(EOFError):  # is shown out, once it has been told
            [stranger.recv_bytes() for _ in range(9)]
        two[1].tell("hello", 1)
        connecting.join(10)
    assert not connecting.is_alive()
    assert two[0]._peers[1].host == socket.gethostname()
    two[1].close()
    two[0].close()


@pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")
def test_a_rank_that_comes_when_no_more_files_can_be_open_comes_in_later(meeting_place, monkeypatch):
    monkeypatch.setattr(module, "_meet_at", lambda address, port: None)
    monkeypatch.setattr(module, "COME_S", 20)
    accept, failures = socket.socket.accept, [OSError(errno.EMFILE, "Too many open files")]

    def at_the_limit(self):
        if failures:
            raise failures.pop()
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", at_the_limit)
    with connected(*(Launch("torchrun", rank, 0, 0, 2, 1, 2) for rank in range(2))) as made:
        assert not failures
        assert made[0]._refused.errno == errno.EMFILE


def test_why_ranks_can_not_come_in_is_told(meeting_place, monkeypatch):
    monkeypatch.setattr(module, "COME_S", 0.5)
    line = Line(Launch("torchrun", 0, 0, 0, 2, 2, 1))

    def at_the_limit(self):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket.socket, "accept", at_the_limit)
    with pytest.raises(
        ConfigError, match=r"rank 1 of 2 did not come .* Connections failed here: Too many open files\."
    ):
        line.gather("hello", None)
    monkeypatch.undo()
    line.close()


def test_a_door_that_nobody_opens_is_left(monkeypatch):
    """As that of a rank 0 whose process hangs: the kernel takes the connection, and no more comes."""
    monkeypatch.setattr(module, "_TRY_S", 0.1)

    class Store:
        def __init__(self, port):
            self.port = port

        def wait(self, keys, patience):
            """It is there."""

        def get(self, key):
            return repr((("127.0.0.1",), self.port, b"key", 1)).encode()

    with socket.create_server(("127.0.0.1", 0)) as door, pytest.raises(OSError, match="no answer"):
        module._connected(Store(door.getsockname()[1]), 10)


def test_rank_0_may_open_as_many_files_as_ranks_need():
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert hard == resource.RLIM_INFINITY or hard > 300
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        module._allow_open_files(300)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (300, hard)
        module._allow_open_files(200)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (300, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
