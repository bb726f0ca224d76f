import io
import re
from collections.abc import Mapping
from itertools import count
from typing import Literal

import pytest
from rich.console import Console
from rich.text import Text

from tests.kit import loop, tiny
from wellfed.train.loop import bar as bars
from wellfed.train.loop.bar import Bar
from wellfed.train.loop.training import Watchers

MANY = {"train/loss": 0.25, "train/rmse": 0.5, "train/lr": 0.001, "val/loss": 0.75, "val/ndcg_at_10": 0.125}
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def rate() -> str:
    return "1,234 windows/s"


def live() -> list[Text]:
    return [Text("GPU 3 %", "red"), Text("wait 84 %", "red"), Text("mem 0.50 of 21.6 GiB"), Text("69 W")]


def draw(
    *,
    width: int = 160,
    latest: Mapping[str, float] = MANY,
    total: int | None = 20,
    encoding: str = "utf-8",
    color: Literal["standard"] | None = None,
) -> str:
    out = io.TextIOWrapper(io.BytesIO(), encoding)
    console = Console(file=out, force_terminal=True, width=width, color_system=color, no_color=False)
    loop.fit(loop.model(), watchers=Watchers(bar=Bar(console, rate, live, total_steps=total, latest=latest)))
    out.flush()
    return out.buffer.getvalue().decode()  # type: ignore[attr-defined]


def lines_of(drawn: str) -> list[str]:
    return [line.rstrip() for line in re.split(r"[\r\n]+", ESCAPES.sub("", drawn))]


@pytest.fixture(autouse=True)
def at_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bars, "REDRAW_S", 0.0)


def test_the_bar_shows_steps_rate_figures_and_the_device() -> None:
    shown = draw(color="standard")
    assert "20/20" in shown
    assert "1,234 windows/s" in shown
    assert "train/loss 0.25" in shown
    assert "\x1b[31mGPU 3 %\x1b[0m  \x1b[31mwait 84 %\x1b[0m  mem 0.50 of 21.6 GiB  69 W" in shown


@pytest.mark.parametrize("latest", [{}, MANY])
def test_at_80_columns_bar_count_and_eta_stay_and_figures_are_below(latest: Mapping[str, float]) -> None:
    lines = lines_of(draw(width=80, latest=latest))
    assert max(map(len, lines)) <= 80
    bars = [line for line in lines if line.startswith("training") and "/20" in line]
    assert len(bars) >= 20
    assert all(re.fullmatch(r"training +\S* +\d+/20 \d:\d\d:\d\d ETA (\d:\d\d:\d\d|-:--:--)", bar) for bar in bars)
    assert any(line.startswith("1,234 windows/s") for line in lines)
    assert any("train/loss 0.25  val/loss 0.75" in line for line in lines) is bool(latest)
    assert "GPU 3 %  wait 84 %  mem 0.50 of 21.6 GiB  69 W" in lines


def test_a_terminal_without_utf_8_gets_an_ascii_bar() -> None:
    drawn = draw(encoding="ascii")
    assert drawn.isascii()
    assert "-" * 24 in drawn


def test_without_colours_the_bar_grows() -> None:
    bars = [line.count("\u2501") for line in lines_of(draw()) if line.startswith("training")]
    assert bars[0] < bars[-1] == 24


def test_a_run_of_unknown_length_shows_its_steps() -> None:
    assert any(re.fullmatch(r"training +20/\? \d:\d\d:\d\d", line) for line in lines_of(draw(total=None)))


def lines_in_a_file(step_s: float) -> list[str]:
    """Returns the lines of a training of 20 steps, whose clock advances by a fixed time per call."""
    out, ticks = io.StringIO(), count(0.0, step_s)
    console = Console(file=out, width=40, get_time=lambda: next(ticks))
    bar = Bar(console, rate, live, total_steps=20, latest=MANY)
    loop.fit(loop.model(), watchers=Watchers(bar=bar), validation=tiny.eval_loader())
    assert not re.search(r"[^\n -~]", out.getvalue())
    return out.getvalue().splitlines()


def test_a_file_gets_one_line_a_minute() -> None:
    lines = lines_in_a_file(21.0)  # asked at each step, and at each batch of the validations
    training = [line for line in lines if line.startswith("training: ")]
    assert 5 <= len(training) <= len(lines) <= 20
    form = (
        r"training: step \d+ of 20, (\d+ min|[\d.]+ s|0 ms).* left, 1,234 windows/s, "
        r"train/loss 0.25, val/loss 0.75, .*"
        r", GPU 3 %, wait 84 %, mem 0.50 of 21.6 GiB, 69 W"
    )
    assert all(re.fullmatch(form, line) for line in training), training


def test_the_sanity_check_gets_no_line() -> None:
    out = io.StringIO()
    bar = Bar(Console(file=out, get_time=lambda: 1e6), rate, live, total_steps=20, latest=MANY)
    bar.look("validating", 0)
    assert out.getvalue() == ""


def test_a_short_run_gets_no_line() -> None:
    assert lines_in_a_file(0.1) == []


def test_steps_that_compile_do_not_count_in_the_time_left() -> None:
    """Three steps of a minute, then 100 steps a second."""
    out, now = io.StringIO(), [0.0]
    console = Console(file=out, force_terminal=True, width=160, color_system=None, get_time=lambda: now[0])
    bar = Bar(console, rate, live, total_steps=1000, latest={})
    step = 0
    bar.begin(step)
    for step_s, steps in [(60.0, 1)] * 3 + [(0.5, 50)] * 4:
        now[0] += step_s
        step += steps
        bar.look("training", step)
    bar.close()
    etas = [eta for eta in re.findall(r"ETA (\S+)", out.getvalue()) if not eta.startswith("-")]
    assert etas
    assert {*etas} <= {"0:00:07", "0:00:08", "0:00:09", "0:00:10"}, etas
