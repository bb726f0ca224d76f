"""Connects the ranks that torchrun or srun has started: what one decides, and that one is gone, reaches the others.

Rank 0 has a connection to each of them, beside the collectives of torch: before there are any, and when one of them
hangs because a rank is gone. The kernel tells of a process that was killed at once, and of a machine that is gone after
`SILENT_S`.
"""

from __future__ import annotations

import ast
import errno
import logging
import os
import secrets
import selectors
import socket
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from multiprocessing.reduction import ForkingPickler
from queue import SimpleQueue
from typing import Any

from wellfed.errors import EXIT_FAILED, ConfigError, first_line
from wellfed.ranks import Launch
from wellfed.run.ending import OK, Outcome, RankEnded

_LOG = logging.getLogger(__name__)
COME_S = 300.0
"""How long rank 0 waits for the others, and they for it: each imports torch first, from a slow disk perhaps."""
REFUSED_S = 60.0
"""The same where rank 0 has only to tell them that nothing is run."""
SILENT_S = 17.0
"""A machine that does not answer for so long is gone."""
GRACE_S = 6.0
"""A rank that knows that another is gone ends by itself within this time, or is ended: its collective may hang."""
LAST_WORDS_S = 5.0
"""What rank 0 then has to write the record. With the two before it is 28 s until all have ended."""
_TRY_S = 5.0
_AGAIN_S = 0.3
_ENDED = "ended"


@dataclass
class _Peer:
    """Another rank."""

    connection: Connection
    node: int
    host: str
    sending: threading.Lock = field(default_factory=threading.Lock)


class Line:
    """This rank's connection to rank 0; of rank 0 those to all others. Opened at the first use."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self._peers: dict[int, _Peer] = {}
        self._ended: dict[int, Outcome] = {}
        """Ranks that have ended, as they have said or as it looks from here."""
        self._said: defaultdict[tuple[int, str], deque[Any]] = defaultdict(deque)
        self._handlers: dict[str, Callable[[int, Any], None]] = {}
        self._to_handle: SimpleQueue[tuple[int, str, Any]] = SimpleQueue()
        self._handling: threading.Thread | None = None
        self._changed = threading.Condition()
        self._is_open = self._is_closed = self._has_said_end = False
        self._store: Any = None
        self._fresh: Any = None
        self._reader: threading.Thread | None = None
        self._refused: OSError | None = None
        """Why the last connection was not taken."""
        self._on_lost: Callable[[Outcome], None] | None = None
        self._forcing: threading.Timer | None = None
        self.is_broken = False
        """A rank has gone without a word."""
        self.on_gone: Callable[[int, Outcome], None] = lambda rank, outcome: None
        """Called then, in a thread of the line."""

    # Speaking and hearing

    def tell(self, kind: str, content: Any = None) -> None:
        """Rank 0 tells all others, another rank tells rank 0. Who is gone does not hear it."""
        self._open()
        words = ForkingPickler.dumps((kind, content))  # once for all, as `Connection.send` does it for one
        for peer in list(self._peers.values()):
            with suppress(OSError), peer.sending:
                peer.connection.send_bytes(words)

    def hear(self, kind: str, rank: int = 0) -> Any:
        """What a rank says next of this kind; waits for as long as it lives.

        Raises:
            RankEnded: it has ended, or another that would be heard of too.
        """
        self._open()
        with self._changed:
            said = self._said[rank, kind]
            self._changed.wait_for(lambda: said or rank in self._ended or self._failure() is not None)
            if said:
                return said.popleft()
            raise RankEnded(self._failure() or self._ended[rank])

    def gather(self, kind: str, own: Any) -> list[Any]:
        """On rank 0 what all ranks say of this kind, in their order; on others nothing.

        Raises:
            RankEnded: one of them has ended.
        """
        if self.launch.rank > 0:
            self.tell(kind, own)
            return []
        self._open()
        return [own, *(self.hear(kind, rank) for rank in range(1, self.launch.world_size))]

    def on(self, kind: str, handler: Callable[[int, Any], None]) -> None:
        """What is said of this kind goes to a handler, with the rank; a thread of their own calls handlers in turn.

        To be called before the ranks are ready: what is said earlier waits for `hear`.
        """
        self._handlers[kind] = handler
        if self._handling is None:
            self._handling = threading.Thread(target=self._handle, name="wellfed-line-handlers", daemon=True)
            self._handling.start()

    # Ends

    def end(self, outcome: Outcome) -> None:
        """This rank ends, or is about to: the others learn how, once."""
        if self._has_said_end or not self._is_open:
            return
        self._has_said_end = True
        self.tell(_ENDED, outcome)

    def reason(self, wait_s: float) -> Outcome | None:
        """How a rank has ended that did not end well and not because of another; waits for one to be told."""
        until_s = time.monotonic() + wait_s
        with self._changed:
            while (found := self._failure()) is None or found.is_of_other_rank:
                left_s = until_s - time.monotonic()
                if left_s <= 0 or not self._changed.wait(left_s):
                    return None if found is None or found.is_of_other_rank else found
            return found

    @contextmanager
    def watching(self, on_lost: Callable[[Outcome], None]) -> Iterator[None]:
        """Within it a rank that goes without a word ends this one too, by force where it hangs.

        Args:
            on_lost: called in a thread of the line before this process ends: writes down what it was.
        """
        with self._changed:
            self._on_lost = on_lost
            lost = self._failure()
        if lost is not None:
            self._force_later(lost)
        try:
            yield
        finally:
            self._on_lost = None
            if self._forcing is not None:
                self._forcing.cancel()

    def close(self, outcome: Outcome = OK) -> None:
        """Say goodbye. Ranks that have not been heard of as yet are told that nothing is run."""
        if self._is_closed:
            return
        if not self._is_open and self.launch.rank == 0:
            with suppress(ConfigError, OSError, RuntimeError):
                self._open(come_s=REFUSED_S)
        self.end(outcome)
        self._is_closed = True
        for peer in self._peers.values():
            with suppress(OSError), _socket_of(peer.connection) as same:
                same.shutdown(socket.SHUT_RDWR)  # which wakes the thread that reads, and closing does not
        if self._reader is not None:
            self._reader.join(_TRY_S)

    def _failure(self) -> Outcome | None:
        """The first of the ends that is not a good one; one that knows its reason before others, and before those that
        were stopped, by torchrun perhaps."""
        bad = [outcome for outcome in self._ended.values() if outcome.exit_code != 0]
        return min(bad, key=lambda one: (one.is_of_other_rank, one.status == "interrupted"), default=None)

    def _ended_as(self, rank: int, outcome: Outcome) -> None:
        with self._changed:
            self._ended.setdefault(rank, outcome)
            self._changed.notify_all()
        if outcome.exit_code == 0:
            return
        if self.launch.rank == 0 and not (outcome.is_of_all or outcome.is_of_other_rank):
            self.end(outcome)  # at once: it alone sees that a machine is gone, and its last words may take long
        self._force_later(outcome)

    def _force_later(self, outcome: Outcome) -> None:
        if outcome.is_of_all:  # rank 0 may write its checkpoint for long
            return
        if self._on_lost is not None and self._forcing is None:
            self._forcing = threading.Timer(GRACE_S, self._force, [outcome])
            self._forcing.daemon = True
            self._forcing.start()

    def _force(self, outcome: Outcome) -> None:
        on_lost = self._on_lost
        if on_lost is None:
            return
        outcome = self.reason(0) or outcome
        last_words = threading.Thread(target=on_lost, args=[outcome], daemon=True)
        last_words.start()
        last_words.join(LAST_WORDS_S)
        self.end(outcome)
        os._exit(outcome.exit_code or EXIT_FAILED)

    # Connections

    def _open(self, come_s: float | None = None) -> None:
        if self._is_open:
            return
        self._is_open = True
        os.register_at_fork(after_in_child=self._let_go)
        _allow_open_files(4 * self.launch.world_size + 1024)
        if self.launch.rank == 0:
            self._await_others(COME_S if come_s is None else come_s)
        else:
            self._join(COME_S if come_s is None else come_s)
        self._reader = threading.Thread(target=self._read, name="wellfed-line", daemon=True)
        self._reader.start()

    def _await_others(self, come_s: float) -> None:
        key, expected = secrets.token_bytes(32), self.launch.world_size - 1
        with socket.create_server(("", 0), backlog=max(16, expected)) as door:
            threading.Thread(target=self._accept, args=[door, key], name="wellfed-line-door", daemon=True).start()
            self._store, host = _store(self.launch, come_s)
            self._fresh = _fresh_store()
            port: int = door.getsockname()[1]
            self._store.set("line", repr((_own_addresses(host), port, key, self._fresh.port)).encode())
            _meet_at("localhost", self._fresh.port)
            with self._changed:
                is_complete = self._changed.wait_for(lambda: len(self._peers) == expected, come_s)
            with suppress(OSError):
                door.shutdown(socket.SHUT_RDWR)  # which wakes the thread that accepts, and closing does not
        if not is_complete:
            missing = sorted(set(range(1, self.launch.world_size)) - self._peers.keys())
            named = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {', '.join(map(str, missing[:8]))}"
            problem = (
                f"{named} of {self.launch.world_size} did not come within {come_s:.0f} s: were they started, and do "
                "their machines reach this one?"
            )
            if self._refused is not None:
                problem += f" Connections failed here: {self._refused.strerror}."
            raise ConfigError.of(self.launch.by, problem, "What they say themselves is in their own output.")

    def _accept(self, door: socket.socket, key: bytes) -> None:
        while True:
            try:
                opened, _ = door.accept()
                connection = Connection(opened.detach())
                threading.Thread(target=self._welcome, args=[connection, key], daemon=True).start()
            except OSError as error:
                if error.errno in (errno.EINVAL, errno.EBADF):  # closed
                    return
                self._refused = error  # one too many for this process, say; the next may come in
                time.sleep(_AGAIN_S)

    def _welcome(self, connection: Connection, key: bytes) -> None:
        try:
            deliver_challenge(connection, key)
            answer_challenge(connection, key)
            rank, node, host = connection.recv()
        except (AuthenticationError, EOFError, OSError):  # a stranger, or one that has given up
            connection.close()
            return
        _notice_silence(connection)
        with self._changed:
            self._peers[rank] = _Peer(connection, node, host)
            self._changed.notify_all()

    def _join(self, come_s: float) -> None:
        until_s = time.monotonic() + come_s
        self._store, _ = _store(self.launch, come_s)
        while time.monotonic() < until_s:
            try:
                connection, address, fresh_port = _connected(self._store, until_s - time.monotonic())
            except (OSError, EOFError, AuthenticationError, RuntimeError):  # of an attempt before this one
                time.sleep(_AGAIN_S)
                continue
            connection.send((self.launch.rank, self.launch.node, socket.gethostname()))
            _notice_silence(connection)
            self._peers[0] = _Peer(connection, 0, "")
            _meet_at(address, fresh_port)
            return
        problem = f"rank 0 did not come within {come_s:.0f} s."
        raise ConfigError.of(f"rank {self.launch.rank}", problem, "What it says itself is in its own output.")

    def _read(self) -> None:
        with selectors.DefaultSelector() as waiting:
            for rank, peer in self._peers.items():
                waiting.register(peer.connection.fileno(), selectors.EVENT_READ, (rank, peer.connection))
            while waiting.get_map() and not self._is_closed:
                for key, _ in waiting.select(timeout=1.0):
                    rank, connection = key.data
                    if not self._take(rank, connection):
                        waiting.unregister(key.fd)
                        connection.close()

    def _take(self, rank: int, connection: Connection) -> bool:
        """What a rank says next; whether it may say more."""
        try:
            kind, content = connection.recv()
        except (EOFError, OSError):
            if not self._is_closed and rank not in self._ended:
                self.is_broken = True
                gone = self._gone(rank)
                self.on_gone(rank, gone)
                self._ended_as(rank, gone)
            return False
        except Exception as error:  # noqa: BLE001  unpickling may raise anything
            self._ended_as(rank, self._not_understood(rank, error))
            return True
        if kind == _ENDED:
            self._ended_as(rank, self._placed(rank, content))
        elif kind in self._handlers:
            self._to_handle.put((rank, kind, content))
        else:
            with self._changed:
                self._said[rank, kind].append(content)
                self._changed.notify_all()
        return True

    def _handle(self) -> None:
        while True:
            rank, kind, content = self._to_handle.get()
            try:
                self._handlers[kind](rank, content)
            except Exception:  # noqa: BLE001  what comes next may be handled
                _LOG.exception("what rank %d said of %s", rank, kind)

    def _gone(self, rank: int) -> Outcome:
        """Of a rank that has not said how it ended."""
        peer = self._peers[rank]
        where = f" on node {peer.node} ({peer.host})" if peer.host else ""
        message = f"Rank {rank}{where} is gone without a word: it was killed, or its machine is gone."
        return Outcome("failed", EXIT_FAILED, "code", message)

    def _not_understood(self, rank: int, error: Exception) -> Outcome:
        """Of a rank whose words can't be read here: whoever waits for them would wait for ever."""
        message = f"What rank {rank} says can't be read on rank {self.launch.rank}: {first_line(error)}"
        advice = "They run different versions of the code: make it the same on all machines."
        return Outcome("failed", EXIT_FAILED, "code", message, advice)

    def _placed(self, rank: int, outcome: Outcome) -> Outcome:
        """With the machine in its message, if that is another."""
        peer = self._peers[rank]
        if outcome.exit_code == 0 or peer.node == self.launch.node or not peer.host:
            return outcome
        return replace(outcome, message=f"Rank {rank} on node {peer.node} ({peer.host}): {outcome.message}")

    def _let_go(self) -> None:
        """In a forked process: or the connection would live as long as it does."""
        for peer in self._peers.values():
            peer.connection.close()


def _store(launch: Launch, come_s: float) -> tuple[Any, str]:
    """The store that the launcher has a place for, and its host.

    Raises:
        ConfigError: it can't be reached or opened.
    """
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    from wellfed.train.lightning.trainer import meeting_place

    is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_master, patience = launch.rank == 0 and not is_agents, timedelta(seconds=come_s)
    try:
        host, port = meeting_place(launch.by)
        store = TCPStore(host, port, None, is_master, patience, wait_for_workers=False, multi_tenant=not is_agents)
    except RuntimeError as error:
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        problem = f"rank {launch.rank} of {launch.world_size} can't meet the others at {place}: {first_line(error)}"
        raise ConfigError.of(launch.by, problem, "Set MASTER_ADDR and MASTER_PORT, or start it again.") from error
    return PrefixStore("wellfed", store), host


def _allow_open_files(wanted: int) -> None:
    """Let this process have so many open, if it may: of the line, of the stores and of Gloo's groups."""
    with suppress(ImportError, ValueError, OSError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        if soft != resource.RLIM_INFINITY and soft < most:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _fresh_store() -> Any:
    """A store that only the ranks of this attempt know.

    torchrun keeps one store for all its attempts: there a rank that is started again finds where the ranks before it
    have listened, and fails (torch 2.13).
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore("localhost", 0, is_master=True, wait_for_workers=False, multi_tenant=True)


def _meet_at(address: str, port: int) -> None:
    """Have torch's ranks meet at the store of rank 0."""
    os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}


def _own_addresses(master: str) -> tuple[str, ...]:
    """By which other machines may reach this one, the likeliest first."""
    found = [master]
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((master, 9))  # sends nothing
        found.append(probe.getsockname()[0])
    return tuple(dict.fromkeys([*found, socket.gethostname()]))


def _connected(store: Any, within_s: float) -> tuple[Connection, str, int]:
    """To rank 0, by which address, and the port of its fresh store."""
    store.wait(["line"], timedelta(seconds=max(1.0, within_s)))
    addresses, port, key, fresh_port = ast.literal_eval(store.get("line").decode())
    failure: OSError | None = None
    for address in addresses:
        try:
            open_socket = socket.create_connection((address, port), timeout=_TRY_S)
        except OSError as error:
            failure = error
            continue
        open_socket.settimeout(None)
        connection = Connection(open_socket.detach())
        if not connection.poll(_TRY_S):
            connection.close()
            raise OSError("no answer")
        answer_challenge(connection, key)
        deliver_challenge(connection, key)
        return connection, address, fresh_port
    raise failure or OSError("no address")


def _socket_of(connection: Connection) -> socket.socket:
    """The same one once more."""
    return socket.socket(fileno=os.dup(connection.fileno()))


def _notice_silence(connection: Connection) -> None:
    """Let the kernel ask whether the other machine is there."""
    options: Mapping[str, int] = {
        "TCP_KEEPIDLE": 5,
        "TCP_KEEPINTVL": 3,
        "TCP_KEEPCNT": 4,
        "TCP_USER_TIMEOUT": round(1000 * SILENT_S),
    }
    with suppress(OSError), _socket_of(connection) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in options.items():
            if hasattr(socket, name):
                same.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
