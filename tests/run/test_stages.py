"""Runs whose end itself goes wrong."""

import logging
import os
import resource
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from wellfed.config.compose import compose
from wellfed.record.entries import RunRecord
from wellfed.run import stages
from wellfed.run.folder.log import log_file
from wellfed.run.folder.run_folder import RunFolder
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
    )


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
