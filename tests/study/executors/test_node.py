"""The process that runs trials on a machine: what it makes sure of before it takes any."""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import DictConfig

from wellfed.config.compose import Composed
from wellfed.config.schema import Allocator, RunConfig
from wellfed.errors import ConfigError, DataError
from wellfed.process import MAY_FORK
from wellfed.project import root, source_digest
from wellfed.run.folder.lock import only_one
from wellfed.study.clusters.keeper import Keeper
from wellfed.study.points.grid import GridPoint
from wellfed.study.row import Row
from wellfed.study.trials import node
from wellfed.study.trials.node_orders import Greeting, TrialOrder, process_settings
from wellfed.study.trials.tasks import RunPoint
from wellfed.study.trials.trial_pool import ForkServers

pytestmark = pytest.mark.skipif(not MAY_FORK, reason="forks")


@pytest.fixture
def greeting(tmp_path: Path) -> Greeting:
    alive = tmp_path / "alive"
    alive.touch()
    return Greeting(str(tmp_path), str(alive), str(root()), source_digest(), "abc", 60, 60, "sweep", ("train.py", "-m"))


def problem(greeting: Greeting) -> str:
    """What a process there has to say."""
    keeper = Keeper(process_settings(greeting))
    try:
        return keeper.greet().problem
    finally:
        keeper.close()


def test_a_machine_with_this_code_that_sees_the_sweep_is_fit(greeting: Greeting) -> None:
    assert problem(greeting) == ""


def test_other_code_is_told_with_both_versions(greeting: Greeting) -> None:
    told = problem(replace(greeting, source="0123456789ab"))
    assert told.startswith(f"it has other code ({root()}: ")
    assert "and the sweep has abc; digest " in told
    assert "not 0123456789ab). Bring it to the same" in told


def test_a_folder_that_is_another_one_there_is_told(greeting: Greeting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "_SEEN_WITHIN_S", 0)
    Path(greeting.alive).unlink()
    told = node._problem(greeting)
    assert told.startswith(f"it does not see the sweep's folder {greeting.sweep}.")
    assert "paths.log_dir" in told


def test_a_folder_that_can_not_be_written_there_is_told(greeting: Greeting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: (path, mode) != (greeting.sweep, os.W_OK))
    assert node._problem(greeting).startswith(f"it can't write to the sweep's folder {greeting.sweep}.")


def test_a_folder_in_which_another_still_writes_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []

    def lock(folder: Path) -> object:
        tries.append(folder)
        if len(tries) < 3:
            raise ConfigError.of(str(folder), "another process is writing to it.", "")
        return only_one(folder)

    monkeypatch.setattr(node, "only_one", lock)
    monkeypatch.setattr(node.time, "sleep", lambda seconds: None)
    trial = tmp_path / "a"
    trial.mkdir()
    (trial / ".lock").touch()
    node.open_when_free(trial, lambda: None)
    assert len(tries) == 3
    assert (tmp_path / "a.attempt1" / ".lock").exists()
    assert list(trial.iterdir()) == []


def test_a_job_of_a_sweep_that_is_over_leaves_the_folder_to_the_next(greeting: Greeting, tmp_path: Path) -> None:
    trial = tmp_path / "a"
    trial.mkdir()
    Path(greeting.alive).unlink()
    with closing(ForkServers(lambda config: None, lambda shared, task: 0, lambda number: tmp_path, 60)) as servers:
        outlived = node._NodeTrials(greeting, tmp_path, servers)
        with pytest.raises(node._SweepIsOverError):
            node.open_when_free(trial, outlived._check_alive)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_what_a_trial_asks_of_torch_does_not_stay_for_the_next(
    greeting: Greeting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(config: RunConfig) -> None:
        raise DataError("x.csv is cut.")

    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    config = RunConfig()
    config.gpu.allocator = Allocator.expandable
    point = RunPoint(
        GridPoint("p", {}, ()), Composed(config, {}, {}, (), frozenset(), None, DictConfig({}), DictConfig({}))
    )
    with closing(ForkServers(fail, lambda shared, task: 0, lambda number: tmp_path / "log", 60)) as servers:
        row = node._NodeTrials(greeting, tmp_path, servers).run(TrialOrder(point, Row("p", "trial", (), "failed", 1)))
    assert (row.status, (row.error or {})["message"]) == ("failed", "x.csv is cut.")
    assert "PYTORCH_CUDA_ALLOC_CONF" not in os.environ


def test_the_process_is_started_with_the_code_of_this_checkout(greeting: Greeting) -> None:
    settings = process_settings(greeting)
    assert settings.python_path[0] == str(root() / "src")
    assert all(Path(folder).is_absolute() for folder in settings.python_path)
