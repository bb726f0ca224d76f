"""``wellfed watch`` under torchrun: the figures of all ranks reach rank 0, and no rank is held up or harmed."""

from __future__ import annotations

import itertools
import socket
import subprocess
import time
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from tests.watch.watching import SCRIPTS, WATCH, ended, findings_of, folder_of, record_of
from wellfed import Watch
from wellfed.ranks import Launch
from wellfed.run.outcome import RankEnded
from wellfed.watch import ranks_of_script
from wellfed.watch.ranks_of_script import TorchrunStore, unknown_ranks
from wellfed.watch.watched_script import WatchedScript

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
RANKS = SCRIPTS / "ranks.py"


def watched(*arguments: str, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    return ended(*TORCHRUN, *WATCH, RANKS, *arguments, cwd=cwd, **more)


@pytest.fixture(scope="module")
def starved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A script whose rank 1 reads slowly, so that rank 0 waits for it."""
    folder = tmp_path_factory.mktemp("starved")
    return folder, watched("--slow-rank", "1", cwd=folder)


@pytest.mark.slow
def test_the_slow_rank_is_found(starved: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, done = starved
    assert done.returncode == 0, done.stderr
    record = record_of(folder)
    assert findings_of(record)[0] == "straggler"
    (finding,) = [one for one in record.findings if one["id"] == "straggler"]
    assert finding["evidence"]["rank"] == 1
    assert finding["evidence"]["part"] == "wait"
    assert "DataLoader" in finding["advice"]
    assert "STRAGGLER" in done.stderr


@pytest.mark.slow
def test_the_record_and_the_page_have_all_ranks(starved: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, done = starved
    record = record_of(folder)
    assert [one["rank"] for one in record.ranks] == [0, 1]
    first, second = record.ranks
    assert (first["steps"], second["steps"]) == (57, 57)
    assert second["wait_frac"] > 0.5 > first["wait_frac"]
    assert first["samples"] == second["samples"] == 8
    assert second["build_ms"] > 30
    assert first["forward_frac"] is not None
    assert (record.steps, record.samples) == (60, 2 * 60 * 8)
    assert record.config["workload"]["effective_batch_size"] == 2 * 8
    assert record.launch is not None
    assert record.launch["by"] == "torchrun"
    assert "are unknown" not in done.stderr
    assert "Ranks side by side" in (folder_of(folder) / "report.html").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(("how", "code"), [("leaves early", 0), ("raises", 1)])
def test_ranks_end_as_they_do_without_the_watch(how: str, code: int, tmp_path: Path) -> None:
    alone = ended(*TORCHRUN, RANKS, "--rank-1", how, cwd=tmp_path)
    done = watched("--rank-1", how, cwd=tmp_path)
    assert (alone.returncode, done.returncode) == (code, code), alone.stderr + done.stderr
    assert done.stdout == alone.stdout
    if how == "raises":
        assert "ValueError: of rank 1" in done.stderr
    steps = {one["rank"]: one["steps"] for one in record_of(tmp_path).ranks}
    if how == "leaves early":
        assert steps == {0: 57, 1: 27}


def test_a_rank_without_a_store_is_left_alone_and_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "none", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with Watch("loop", tmp_path):
        assert WatchedScript.current is None
    monkeypatch.setenv("RANK", "0")
    with Watch("loop", tmp_path):
        assert WatchedScript.current is not None
    assert "rank 1 are unknown: only torchrun's ranks" in str(unknown_ranks(2, set(), None))


def launch(rank: int, ranks: int = 2) -> Launch:
    return Launch("torchrun", rank, rank, 0, ranks, 1, ranks)


def test_rank_0_waits_a_bounded_time_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store is such as torchrun serves, for ranks that are all in this process."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    monkeypatch.setattr(ranks_of_script, "_NUMBERS", itertools.repeat(0))
    monkeypatch.setattr(ranks_of_script, "LATE_S", 0.3)
    stores = [TorchrunStore(launch(rank, 3)) for rank in range(3)]
    assert stores[1].gather("last", 1) == []
    began_s = time.monotonic()
    assert stores[0].gather("last", 0) == [0, 1]
    assert 0.3 <= time.monotonic() - began_s < 5
    stores[2].publish("last", 2)
    monkeypatch.setattr(ranks_of_script, "LATE_S", 60.0)
    assert stores[0].gather("last", 0) == [0, 1, 2]


def test_a_store_that_accepts_and_never_answers_costs_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_of_script, "PATIENCE_S", 0.3)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(silent.getsockname()[1]))
        store, began_s = TorchrunStore(launch(0)), time.monotonic()
        for _ in range(9):
            with pytest.raises(RankEnded):
                store.gather("figures", {})
        assert time.monotonic() - began_s < 3
    assert "no answer within 0.3 s" in str(unknown_ranks(2, set(), store))
