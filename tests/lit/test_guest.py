from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from wellfed.lit.guest import FiguresLogger


def test_numbers_are_handed_on_and_nothing_else(tmp_path: Path):
    taken: list[dict[str, float]] = []
    logger = FiguresLogger(lambda values: taken.append(dict(values)), tmp_path)
    logger.log_metrics({"a": 1, "b": torch.tensor([2.5]), "text": "no", "many": torch.ones(3)}, step=4)
    logger.log_hyperparams({"lr": 1})
    assert taken == [{"a": 1.0, "b": 2.5}]


def test_what_the_experiment_is_given_is_said_to_be_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    logger = FiguresLogger(lambda values: None, tmp_path)
    experiment = logger.experiment
    assert not caplog.messages  # Lightning asks for it, too
    with caplog.at_level(logging.WARNING):
        experiment.add_image("a", torch.ones(3))
        experiment.add_text("a", "b")
    (line,) = caplog.messages
    assert "add_image" in line


def test_files_of_the_users_callbacks_lie_apart(tmp_path: Path):
    logger = FiguresLogger(lambda values: None, tmp_path)
    assert (logger.save_dir, logger.name, logger.version) == (str(tmp_path), "lightning", "")
