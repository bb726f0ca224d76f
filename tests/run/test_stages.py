"""Runs whose end itself goes wrong."""

import logging
import os
import resource
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.kit.composed import compose
from wellfed.errors import EXIT_OUT_OF_MEMORY, RestartNeeded
from wellfed.ranks import lightnings_launch
from wellfed.record.entries import RunRecord
from wellfed.run import restart, stages
from wellfed.run.folder.log import log_file
from wellfed.run.folder.run_folder import RunFolder
from wellfed.run.outcome import Outcome
from wellfed.run.ranks.coordination import OtherRanks
from wellfed.run.restart import Restarts
from wellfed.run.screen import Terminal


class Training(stages.Run):
    """A run that ends with a bug while it trains."""

    def _stages(self) -> None:
        self._started()
        raise ValueError("bug")


@pytest.fixture
def start(tmp_path: Path) -> Any:
    return SimpleNamespace(
        rank=0,
        restarts=Restarts(),
        is_trial=False,
        folder=RunFolder(tmp_path, is_new=True),
        console=Terminal(quiet=True),
        record=RunRecord.start("r"),
        began_s=time.monotonic(),
        composed=compose(["workload.name=w"]),
        shared=None,
        exchange=None,
        target=None,
        stop=SimpleNamespace(is_finishing=False),
        pruner=None,
    )


class RunsOut(stages.Run):
    """A run that runs out of memory, alone or of two ranks."""

    ranks: Any = None

    def _stages(self) -> None:
        self._started()
        self._others.exchange = self.ranks
        passes = SimpleNamespace(fit=self._fails)
        self._fit(cast(Any, passes), None)

    def _fails(self, *_: object) -> None:
        raise RestartNeeded("Out of memory", {"memory.micro_batch": 4})


class Ranks:
    """Ranks that Lightning has started."""

    launch = lightnings_launch(0, 2)

    def report(self, outcome: Outcome) -> None:
        pass

    def close(self, outcome: Outcome) -> None:
        pass


class Gone:
    """An output whose reader has ended."""

    encoding = "utf-8"

    def write(self, text: str) -> int:
        raise BrokenPipeError

    def flush(self) -> None:
        raise BrokenPipeError


def test_a_trained_run_ends_as_ever_without_a_terminal(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Gone())
    assert Training(start).go() == 1
    assert start.folder.stays
    assert RunRecord.read(start.folder.path).status == "failed"


@pytest.mark.parametrize("has_ranks", [False, True])
@pytest.mark.parametrize(
    ("argv", "number", "times", "is_restarted"),
    [
        (["src/train.py"], "???", "0", True),
        (["/bin/wellfed", "train"], "???", "11", True),
        (["src/train.py", "-m", "a=1,2"], 1, "0", False),
        (["/bin/wellfed", "bench"], "???", "0", False),
        (["/site/submitit/_submit.py"], "???", "0", False),
        (["src/train.py"], "???", "12", False),
    ],
)
def test_only_the_command_of_one_run_is_restarted_and_not_for_ever(
    start: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    argv: list[str],
    number: Any,
    times: str,
    is_restarted: bool,
    has_ranks: bool,
) -> None:
    asked = []
    monkeypatch.setattr(restart, "ask", lambda folder, reason: asked.append(reason))
    monkeypatch.setattr(Restarts, "now", lambda self, folder, reason: asked.append(reason))
    monkeypatch.setattr(RunsOut, "ranks", Ranks() if has_ranks else None)
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setenv("WELLFED_RESTARTS", times)
    start.restarts = Restarts()
    hydra = start.composed._hydra
    start.composed = replace(start.composed, _hydra={**hydra, "job": {**hydra["job"], "num": number}})
    assert RunsOut(start).go() == EXIT_OUT_OF_MEMORY
    assert bool(asked) is is_restarted
    advice = "Out of memory. Start it again with memory.micro_batch=4."
    assert (advice in capsys.readouterr().err) is not is_restarted


def test_the_record_has_the_failure_before_other_ranks_are_asked(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []

    def outcome(_: object, own: Outcome) -> Outcome:  # Lightning may kill rank 0 here
        found.append(RunRecord.read(start.folder.path))
        return own

    monkeypatch.setattr(OtherRanks, "outcome", outcome)
    start.exchange = Ranks()
    assert Training(start).go() == 1
    assert [(one.status, one.exit_code, one.error and one.error["message"]) for one in found] == [
        ("failed", 1, "ValueError: bug")
    ]


def test_a_trained_run_stays_if_its_end_fails(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def outcome_of(*_: object, **__: object) -> None:
        raise RuntimeError("another bug")

    monkeypatch.setattr(stages, "outcome_of", outcome_of)
    with pytest.raises(RuntimeError, match="another bug"):
        Training(start).go()
    assert start.folder.stays


class Hoarding(stages.Run):
    """A run whose data keeps files open until no more can be."""

    def _stages(self) -> None:
        self._started()
        self.held = []
        while True:
            try:
                self.held.append(open(os.devnull))  # noqa: SIM115
            except OSError:
                logging.getLogger("wellfed").info("No more files")  # the first message opens the log
                raise


def test_a_run_with_too_many_open_files_has_a_record(start: Any) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (120, limits[1]))
    run = Hoarding(start)
    try:
        with log_file(start.folder.path / "train.log"):
            assert run.go() == 1
    finally:
        for each in run.held:
            each.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    found = RunRecord.read(start.folder.path)
    assert found.status == "failed"
    assert found.error is not None
    assert found.error["message"] == f"OSError: [Errno 24] Too many open files: '{os.devnull}'"
    assert "ended by Traceback" in (start.folder.path / "train.log").read_text()
    assert "There is no checkpoint to go on from" in found.error["advice"]
