import socket

import pytest

from wellfed.ranks import Launch
from wellfed.run.ranks import store
from wellfed.run.ranks.exchange import Exchange


def launch(rank: int, world_size: int) -> Launch:
    """A rank of torchrun's, each on its own machine."""
    return Launch("torchrun", rank, 0, rank, world_size, world_size, 1)


@pytest.fixture
def launcher(monkeypatch):
    """What torchrun writes for its ranks, where its agent has no store of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MASTER_PORT", str(free.getsockname()[1]))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    monkeypatch.setattr(store, "_meet_at", lambda host, port: None)  # all ranks have one environment here


@pytest.fixture
def exchanges(launcher):
    """Those of three ranks on as many machines, in threads of this process."""
    made = [Exchange(launch(rank, 3)) for rank in range(3)]
    yield made
    for exchange in reversed(made):
        exchange.close()
