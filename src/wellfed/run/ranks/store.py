"""Opens the store of torch.distributed that the ranks of one run share.

Rank 0 serves a new `TCPStore` for each start of the run. torchrun keeps one store for all its attempts, where a
restarted rank finds the addresses of the previous attempt and fails (torch 2.13). So the launcher's store holds only
the address of the new one, which torch's process groups use, too.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from wellfed.errors import ConfigError, first_line
from wellfed.ranks import Launch

Address = tuple[Sequence[str], int]
"""Hosts and port of an open store."""
_ADDRESS = "wellfed"
_CONNECT_S = 5.0


def serve() -> Any:
    """Returns a store that this process serves."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore("localhost", 0, is_master=True, wait_for_workers=False, multi_tenant=True)


def publish(port: int, launch: Launch, come_s: float) -> Any:
    """Puts the store's address into the launcher's store, and returns that, since this process may have to serve it."""
    launchers, host = _launchers_store(launch, come_s)
    launchers.set(_ADDRESS, json.dumps([_own_addresses(host), port]).encode())
    _meet_at("localhost", port)
    return launchers


def find(launch: Launch, come_s: float) -> Any:
    """Connects to the store whose address rank 0 has published, and returns it.

    Raises:
        ConfigError: rank 0 has not published it within the time.
    """
    launchers, _ = _launchers_store(launch, come_s)
    until_s = time.monotonic() + come_s
    while (left_s := until_s - time.monotonic()) > 0:
        with suppress(RuntimeError):  # the address of an earlier attempt
            launchers.wait([_ADDRESS], timedelta(seconds=max(1.0, left_s)))
            store = connect(json.loads(launchers.get(_ADDRESS)))
            _meet_at(store.host, store.port)
            return store
        time.sleep(0.3)
    problem = f"rank 0 did not come within {come_s:.0f} s."
    raise ConfigError.of(f"rank {launch.rank}", problem, "Its own output has the reason.")


def connect(address: Address) -> Any:
    """Connects to a store by the first of its hosts that answers, and returns it."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    hosts, port = address
    failure = RuntimeError("no host")
    for host in hosts:
        try:
            return TCPStore(host, port, None, False, timedelta(seconds=_CONNECT_S), wait_for_workers=False)
        except RuntimeError as error:
            failure = error
    raise failure


def _launchers_store(launch: Launch, come_s: float) -> tuple[Any, str]:
    """Returns the store that the launcher has an address for, and its host.

    Raises:
        ConfigError: it can't be reached or opened.
    """
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    from wellfed.train.loop.place import meeting_place

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
    """Makes torch's process groups meet at the store of rank 0."""
    os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}


def _own_addresses(master: str) -> tuple[str, ...]:
    """Returns hosts by which other machines may reach this one, the likeliest first."""
    hosts = [master]
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((master, 9))  # sends nothing
        hosts.append(probe.getsockname()[0])
    return tuple(dict.fromkeys([*hosts, socket.gethostname()]))
