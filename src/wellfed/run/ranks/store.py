"""Opens the store of torch.distributed that the ranks of one run share, and signs what they put into it.

Rank 0 serves a new `TCPStore` for each start of the run. torchrun keeps one store for all its attempts: there a rank
that is started again finds the addresses of the attempt before, and fails (torch 2.13). So the launcher's store holds
only the address of the new one, and torch's own process groups meet at the new one, too.
"""

from __future__ import annotations

import ast
import hmac
import json
import os
import pickle
import secrets
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from datetime import timedelta
from typing import Any

from wellfed.errors import ConfigError, first_line
from wellfed.ranks import Launch

Address = tuple[str, int, bytes]
"""Host, port and key of a store that is open."""
_ADDRESS = "wellfed"
_CONNECT_S = 5.0
_DIGEST_BYTES = 32
_WAY_OUT = "What it says itself is in its own output."


class StoreGone(Exception):
    """Rank 0, which serves the store, can't be reached."""


@dataclass(frozen=True)
class Member:
    """Process and machine of a rank that has joined."""

    node: int
    host: str
    pid: int


class RankStore:
    """A `TCPStore` whose pickled objects carry a signature: only ranks of the run make one another unpickle something.

    Args:
        store: of torch.
        key: of the signature.
        launchers: the launcher's store, which this process may serve, and which must live as long.
    """

    def __init__(self, store: Any, key: bytes, launchers: Any = None) -> None:
        self._store, self._key, self._launchers = store, key, launchers

    @property
    def address(self) -> Address:
        """Where another process on this machine joins."""
        return "localhost", self._store.port, self._key

    def call(self, method: str, *arguments: Any) -> Any:
        """Returns what a method of torch's store returns.

        Raises:
            StoreGone: rank 0 can't be reached.
        """
        try:
            return getattr(self._store, method)(*arguments)
        except RuntimeError as error:
            raise StoreGone(first_line(error)) from error

    def has(self, key: str) -> bool:
        """Returns whether there is something under a key. torch's own ``wait`` prints a warning when time is over."""
        return bool(self.call("check", [key]))

    def put(self, key: str, content: Any) -> None:
        """Pickles, signs and sends an object."""
        data = pickle.dumps(content)
        self.call("set", key, self._signature(data) + data)

    def take(self, key: str, *, is_last: bool) -> Any:
        """Returns an object that is there, and removes it where this is the last rank to read it.

        Raises:
            ValueError: it has no signature of this run.
            Exception: it can't be unpickled, which may raise anything.
        """
        signed: bytes = self.call("get", key)
        if is_last:
            self.call("delete_key", key)
        data = signed[_DIGEST_BYTES:]
        if not hmac.compare_digest(signed[:_DIGEST_BYTES], self._signature(data)):
            raise ValueError("it was signed by another run")
        return pickle.loads(data)

    def enter(self, rank: int, node: int) -> Member:
        """Adds this process as a rank."""
        member = Member(node, socket.gethostname(), os.getpid())
        self.call("set", f"beat/{rank}", "0")
        self.call("set", f"member/{rank}", json.dumps(astuple(member)))
        return member

    def member(self, rank: int) -> Member | None:
        """Returns the process of a rank, if it has joined."""
        key = f"member/{rank}"
        return Member(*json.loads(self.call("get", key))) if self.has(key) else None

    def _signature(self, data: bytes) -> bytes:
        return hmac.digest(self._key, data, "sha256")


def serve() -> RankStore:
    """Opens the store on rank 0."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    opened = TCPStore("localhost", 0, is_master=True, wait_for_workers=False, multi_tenant=True)
    opened.set("ends", "\n")
    return RankStore(opened, secrets.token_bytes(_DIGEST_BYTES))


def publish(served: RankStore, launch: Launch, come_s: float) -> None:
    """Puts the address of the store into the launcher's, and has torch's process groups on rank 0 meet at it."""
    launchers, host = _launchers_store(launch, come_s)
    _, port, key = served.address
    launchers.set(_ADDRESS, repr((_own_addresses(host), port, key)).encode())
    served._launchers = launchers
    _meet_at("localhost", port)


def joined(address: Address) -> RankStore:
    """Connects to a store on this machine whose address is known."""
    host, port, key = address
    return RankStore(_connected([host], port), key)


def found(launch: Launch, come_s: float) -> RankStore:
    """Connects to the store whose address rank 0 has put into the launcher's.

    Raises:
        ConfigError: rank 0 has not come within the time.
    """
    launchers, _ = _launchers_store(launch, come_s)
    until_s = time.monotonic() + come_s
    while (left_s := until_s - time.monotonic()) > 0:
        try:
            launchers.wait([_ADDRESS], timedelta(seconds=max(1.0, left_s)))
            addresses, port, key = ast.literal_eval(launchers.get(_ADDRESS).decode())
            store = _connected(addresses, port)
        except RuntimeError:  # the address of an attempt before this one
            time.sleep(0.3)
            continue
        _meet_at(store.host, port)
        return RankStore(store, key)
    raise ConfigError.of(f"rank {launch.rank}", f"rank 0 did not come within {come_s:.0f} s.", _WAY_OUT)


def _connected(hosts: Sequence[str], port: int) -> Any:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    failure: RuntimeError | None = None
    for host in hosts:
        try:
            return TCPStore(host, port, None, False, timedelta(seconds=_CONNECT_S), wait_for_workers=False)
        except RuntimeError as error:
            failure = error
    raise failure or RuntimeError("no address")


def _launchers_store(launch: Launch, come_s: float) -> tuple[Any, str]:
    """Returns the store that the launcher has an address for, and its host.

    Raises:
        ConfigError: it can't be reached or opened.
    """
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    from wellfed.train.lightning.meeting_place import meeting_place

    is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_master, patience = launch.rank == 0 and not is_agents, timedelta(seconds=come_s)
    try:
        host, port = meeting_place(launch.by)
        store = TCPStore(host, port, None, is_master, patience, wait_for_workers=False, multi_tenant=not is_agents)
    except RuntimeError as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        problem = f"rank {launch.rank} of {launch.world_size} can't meet the others at {where}: {first_line(error)}"
        raise ConfigError.of(launch.by, problem, "Set MASTER_ADDR and MASTER_PORT, or start it again.") from error
    return PrefixStore("wellfed", store), host


def _meet_at(host: str, port: int) -> None:
    """Has torch's process groups meet at the store of rank 0."""
    os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}


def _own_addresses(master: str) -> tuple[str, ...]:
    """Addresses by which other machines may reach this one, the likeliest first."""
    addresses = [master]
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((master, 9))  # sends nothing
        addresses.append(probe.getsockname()[0])
    return tuple(dict.fromkeys([*addresses, socket.gethostname()]))
