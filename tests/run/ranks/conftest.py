import pytest

from tests.run.ranks.processes import free_port, launch, ranks_in
from wellfed.run.ranks import store
from wellfed.run.ranks.exchange import Exchange


@pytest.fixture
def launcher(monkeypatch):
    """What torchrun writes for its ranks, where its agent has no store of its own."""
    monkeypatch.setenv("MASTER_PORT", free_port())
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


@pytest.fixture
def ranks(tmp_path):
    with ranks_in(tmp_path) as made:
        yield made
