from __future__ import annotations

import io
import re
from collections.abc import Mapping
from itertools import count
from pathlib import Path

import pytest
from rich.console import Console

from tests.kit import tiny
from wellfed.train.lightning.callbacks import progress
from wellfed.train.lightning.callbacks.progress import Counts, ProgressBar

pytestmark = pytest.mark.filterwarnings("ignore::Warning:lightning")


MANY = {"train/loss": 0.25, "train/rmse": 0.5, "train/lr": 0.001, "val/loss": 0.75, "val/ndcg_at_10": 0.125}


def draw(tmp_path: Path, *, terminal: bool, width: int = 160, latest: Mapping[str, float] = MANY) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=width, color_system=None)
    bar = ProgressBar(console, total_steps=20, latest=latest, rate=lambda: 1234.0, unit="windows")
    tiny.fit(tiny.module(), tmp_path, [bar])
    return out.getvalue()


def test_the_bar_shows_steps_rate_and_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "REDRAW_S", 0.0)
    shown = draw(tmp_path, terminal=True)
    assert "20/20" in shown
    assert "1,234 windows/s" in shown
    assert "train/loss 0.25" in shown


@pytest.mark.parametrize("latest", [{}, MANY])
def test_at_80_columns_bar_count_and_eta_stay_and_figures_are_below(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, latest: Mapping[str, float]
) -> None:
    monkeypatch.setattr(progress, "REDRAW_S", 0.0)
    drawn = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", draw(tmp_path, terminal=True, width=80, latest=latest))
    lines = [line.rstrip() for line in re.split(r"[\r\n]+", drawn)]
    assert max(map(len, lines)) <= 80
    bars = [line for line in lines if line.startswith("training") and "/20" in line]
    assert len(bars) >= 20
    assert all(re.fullmatch(r"training +\S+ +\d+/20 \d:\d\d:\d\d ETA (\d:\d\d:\d\d|-:--:--)", bar) for bar in bars[1:])
    assert any(line.startswith("1,234 windows/s") for line in lines)
    assert any("train/loss 0.25  val/loss 0.75" in line for line in lines) is bool(latest)


def lines_in_a_file(tmp_path: Path, step_s: float) -> list[str]:
    """Returns the bar of a training of 20 steps, whose clock advances by a fixed time per call."""
    out, ticks = io.StringIO(), count(0.0, step_s)
    console = Console(file=out, width=40)
    bar = ProgressBar(
        console, total_steps=20, latest=MANY, rate=lambda: 1234.0, unit="windows", clock=lambda: next(ticks)
    )
    tiny.fit(tiny.module(), tmp_path, [bar])
    assert out.getvalue().isprintable() or not re.search(r"[^\n -~]", out.getvalue())
    return out.getvalue().splitlines()


def test_a_file_gets_one_line_a_minute(tmp_path: Path) -> None:
    lines = lines_in_a_file(tmp_path, 21.0)  # asked at each step, and at each batch of the validations
    training = [line for line in lines if line.startswith("training: ")]
    assert 5 <= len(training) <= len(lines) <= 20
    form = r"training: step \d+ of 20, (\d+ min|[\d.]+ s).* left, 1,234 windows/s, train/loss 0.25, val/loss 0.75, .*"
    assert all(re.fullmatch(form, line) for line in training), training


def test_a_short_run_gets_no_line(tmp_path: Path) -> None:
    assert lines_in_a_file(tmp_path, 0.1) == []


def test_counts_tell_steps_epochs_and_samples(tmp_path: Path) -> None:
    started: list[bool] = []
    told: list[tuple[int, float, int]] = []
    counts = Counts(lambda: started.append(True), lambda *facts: told.append(facts), 3)
    tiny.fit(tiny.module(), tmp_path, [counts], max_steps=4)
    assert started == [True]
    assert [(step, samples) for step, _, samples in told] == [(1, 32), (2, 32), (3, 6), (4, 32)]
    assert [epochs for _, epochs, _ in told] == pytest.approx([1 / 3, 2 / 3, 1, 4 / 3])
