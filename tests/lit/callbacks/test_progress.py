from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from tests.lit import tiny
from wellfed.lit.callbacks import progress
from wellfed.lit.callbacks.progress import Counts, ProgressBar

pytestmark = pytest.mark.filterwarnings("ignore::Warning:lightning")


def draw(tmp_path: Path, *, terminal: bool) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=160)
    bar = ProgressBar(console, total_steps=20, latest={"train/loss": 0.25}, rate=lambda: 1234.0, unit="windows")
    tiny.fit(tiny.module(), tmp_path, [bar])
    return out.getvalue()


def test_the_bar_shows_steps_rate_and_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "REDRAW_S", 0.0)
    shown = draw(tmp_path, terminal=True)
    assert "20/20" in shown
    assert "1,234 windows/s" in shown
    assert "train/loss 0.25" in shown


def test_a_file_gets_no_bar(tmp_path: Path) -> None:
    assert draw(tmp_path, terminal=False).strip() == ""


def test_counts_tell_steps_epochs_and_samples(tmp_path: Path) -> None:
    started: list[bool] = []
    told: list[tuple[int, float, int]] = []
    counts = Counts(lambda: started.append(True), lambda *facts: told.append(facts), 3)
    tiny.fit(tiny.module(), tmp_path, [counts], max_steps=4)
    assert started == [True]
    assert [(step, samples) for step, _, samples in told] == [(1, 32), (2, 32), (3, 6), (4, 32)]
    assert [epochs for _, epochs, _ in told] == pytest.approx([1 / 3, 2 / 3, 1, 4 / 3])
