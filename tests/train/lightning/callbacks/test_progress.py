import io
import re
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest
from rich.console import Console
from rich.text import Text

from tests.kit import tiny
from wellfed.observe.telemetry.run_progress import Progress
from wellfed.train.lightning.callbacks import progress
from wellfed.train.lightning.callbacks.progress import ProgressBar, ProgressReport

pytestmark = pytest.mark.filterwarnings("ignore::Warning:lightning")


MANY = {"train/loss": 0.25, "train/rmse": 0.5, "train/lr": 0.001, "val/loss": 0.75, "val/ndcg_at_10": 0.125}
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def rate() -> str:
    return "1,234 windows/s"


def live() -> list[Text]:
    return [Text("GPU 3 %", "red"), Text("wait 84 %", "red"), Text("mem 0.50 of 21.6 GiB"), Text("69 W")]


def draw(
    tmp_path: Path,
    *,
    width: int = 160,
    latest: Mapping[str, float] = MANY,
    total: int | None = 20,
    encoding: str = "utf-8",
    color: Literal["standard"] | None = None,
) -> str:
    out = io.TextIOWrapper(io.BytesIO(), encoding)
    console = Console(file=out, force_terminal=True, width=width, color_system=color, no_color=False)
    tiny.fit(tiny.module(), tmp_path, [ProgressBar(console, rate, live, total_steps=total, latest=latest)])
    out.flush()
    return out.buffer.getvalue().decode()  # type: ignore[attr-defined]


def lines_of(drawn: str) -> list[str]:
    return [line.rstrip() for line in re.split(r"[\r\n]+", ESCAPES.sub("", drawn))]


@pytest.fixture(autouse=True)
def at_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "REDRAW_S", 0.0)


def test_the_bar_shows_steps_rate_figures_and_the_device(tmp_path: Path) -> None:
    shown = draw(tmp_path, color="standard")
    assert "20/20" in shown
    assert "1,234 windows/s" in shown
    assert "train/loss 0.25" in shown
    assert "\x1b[31mGPU 3 %\x1b[0m  \x1b[31mwait 84 %\x1b[0m  mem 0.50 of 21.6 GiB  69 W" in shown


@pytest.mark.parametrize("latest", [{}, MANY])
def test_at_80_columns_bar_count_and_eta_stay_and_figures_are_below(
    tmp_path: Path, latest: Mapping[str, float]
) -> None:
    lines = lines_of(draw(tmp_path, width=80, latest=latest))
    assert max(map(len, lines)) <= 80
    bars = [line for line in lines if line.startswith("training") and "/20" in line]
    assert len(bars) >= 20
    assert all(re.fullmatch(r"training +\S* +\d+/20 \d:\d\d:\d\d ETA (\d:\d\d:\d\d|-:--:--)", bar) for bar in bars)
    assert any(line.startswith("1,234 windows/s") for line in lines)
    assert any("train/loss 0.25  val/loss 0.75" in line for line in lines) is bool(latest)
    assert "GPU 3 %  wait 84 %  mem 0.50 of 21.6 GiB  69 W" in lines


def test_at_30_columns_count_and_eta_stay(tmp_path: Path) -> None:
    lines = lines_of(draw(tmp_path, width=30))
    assert max(map(len, lines)) <= 30
    assert any(re.fullmatch(r"20/20 0:00:0\d ETA 0:00:00", line) for line in lines)
    assert "GPU 3 %  wait 84 %" in lines


def test_a_terminal_without_utf_8_gets_an_ascii_bar(tmp_path: Path) -> None:
    drawn = draw(tmp_path, encoding="ascii")
    assert drawn.isascii()
    assert "#" * 24 in drawn


def test_without_colours_the_bar_grows(tmp_path: Path) -> None:
    bars = [line.count("\u2501") for line in lines_of(draw(tmp_path)) if line.startswith("training")]
    assert bars[0] < bars[-1] == 24


def test_a_run_of_unknown_length_shows_its_steps(tmp_path: Path) -> None:
    assert any(re.fullmatch(r"training  step 20 \d:\d\d:\d\d", line) for line in lines_of(draw(tmp_path, total=None)))


def lines_in_a_file(tmp_path: Path, step_s: float) -> list[str]:
    """Returns the lines of a training of 20 steps, whose clock advances by a fixed time per call."""
    out, ticks = io.StringIO(), count(0.0, step_s)
    console = Console(file=out, width=40)
    bar = ProgressBar(console, rate, live, total_steps=20, latest=MANY, clock=lambda: next(ticks))
    tiny.fit(tiny.module(), tmp_path, [bar])
    assert not re.search(r"[^\n -~]", out.getvalue())
    return out.getvalue().splitlines()


def test_a_file_gets_one_line_a_minute(tmp_path: Path) -> None:
    lines = lines_in_a_file(tmp_path, 21.0)  # asked at each step, and at each batch of the validations
    training = [line for line in lines if line.startswith("training: ")]
    assert 5 <= len(training) <= len(lines) <= 20
    form = (
        r"training: step (?:[1-3] of 20|\d+ of 20, (\d+ min|[\d.]+ s|0 ms).* left), 1,234 windows/s, "
        r"train/loss 0.25, val/loss 0.75, .*"
        r", GPU 3 %, wait 84 %, mem 0.50 of 21.6 GiB, 69 W"
    )
    assert all(re.fullmatch(form, line) for line in training), training


def test_the_sanity_check_gets_no_line() -> None:
    out = io.StringIO()
    bar = ProgressBar(Console(file=out), rate, live, total_steps=20, latest=MANY, clock=lambda: 1e6)
    bar.on_validation_batch_end(SimpleNamespace(global_step=0))  # type: ignore[arg-type]
    assert out.getvalue() == ""


def test_a_short_run_gets_no_line(tmp_path: Path) -> None:
    assert lines_in_a_file(tmp_path, 0.1) == []


def test_counts_tell_steps_epochs_and_samples(tmp_path: Path) -> None:
    started: list[bool] = []
    told: list[tuple[int, float, int]] = []
    counts = ProgressReport(Progress(), lambda: started.append(True), lambda *facts: told.append(facts), 3)
    tiny.fit(tiny.module(), tmp_path, [counts], max_steps=4)
    assert started == [True]
    assert [(step, samples) for step, _, samples in told] == [(1, 32), (2, 32), (3, 6), (4, 32)]
    assert [epochs for _, epochs, _ in told] == pytest.approx([1 / 3, 2 / 3, 1, 4 / 3])


def test_steps_that_compile_do_not_count_in_the_time_left() -> None:
    """Three steps of a minute, then 100 steps a second."""
    out, now = io.StringIO(), [0.0]
    console = Console(file=out, force_terminal=True, width=160, color_system=None)
    bar = ProgressBar(console, rate, live, total_steps=1000, latest={}, clock=lambda: now[0])
    trainer = SimpleNamespace(global_step=0)
    bar.on_train_start(trainer, None)  # type: ignore[arg-type]
    for step_s, steps in [(60.0, 1)] * 3 + [(0.5, 50)] * 4:
        now[0] += step_s
        trainer.global_step += steps
        bar.on_train_batch_end(trainer, None, None, None, 0)  # type: ignore[arg-type]
    bar.on_train_end(trainer, None)  # type: ignore[arg-type]
    etas = [eta for eta in re.findall(r"ETA (\S+)", out.getvalue()) if not eta.startswith("-")]
    assert etas
    assert {*etas} <= {"0:00:07", "0:00:08", "0:00:09"}, etas
