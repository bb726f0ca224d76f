"""What `benchmarks/long_runs.py` finds in figures, in small runs, and in runs with a planted fault."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import long_runs

DONE = np.linspace(500.0, 1000.0, 200)
NOISY = np.random.default_rng(0).normal(0.0, 1.0, 200)


@pytest.mark.parametrize(
    ("values", "documented", "verdict"),
    [
        (1e6 + 2000.0 * NOISY, 0.0, "flat"),
        (1e6 + 40.0 * DONE + 2000.0 * NOISY, 0.0, "GROWS"),
        (1e6 + 40.0 * DONE + 2000.0 * NOISY, 22_500.0, "as documented"),
        (1e6 + 90.0 * DONE + 2000.0 * NOISY, 22_500.0, "GROWS"),
        (1e6 + 2e5 * NOISY, 0.0, "unclear"),
    ],
    ids=["flat", "a leak", "documented", "more than documented", "too noisy"],
)
def test_growth_counts_beyond_noise_and_beyond_what_is_documented(values: Any, documented: float, verdict: str) -> None:
    assert long_runs.growth(DONE, values, "uss_kib", documented)["verdict"] == verdict


def test_one_more_handle_is_noise_and_three_are_not() -> None:
    for number, verdict in ((1, "flat"), (3, "GROWS")):
        assert long_runs.growth(DONE, 40.0 + number * (DONE - 500) / 500, "handles", 0.0)["verdict"] == verdict


def test_a_few_samples_are_no_verdict() -> None:
    assert long_runs.growth(DONE[:15], DONE[:15], "threads", 0.0)["verdict"] == "too short"
    assert long_runs.speed("speed", DONE[:15], DONE[:15], 0.0)["verdict"] == "too short"


@pytest.mark.parametrize(
    ("unit_s", "verdict", "times_as_fast"),
    [
        (0.1 + 0.0 * DONE, "level", 1.0),
        (np.linspace(0.1, 0.2, 200), "SLOWER", 0.54),
        (0.1 * np.exp(0.8 * np.sin(DONE / 40)), "unclear", None),
    ],
    ids=["even", "twice as slow", "a busy machine"],
)
def test_the_end_is_slower_if_it_is_slower_beyond_noise(unit_s: Any, verdict: str, times_as_fast: float | None) -> None:
    row = long_runs.speed("speed", DONE, np.cumsum(unit_s), DONE[0])
    assert row["verdict"] == verdict
    assert times_as_fast is None or row["times_as_fast"] == pytest.approx(times_as_fast, abs=0.02)


def test_all_that_may_grow_is_a_figure_of_a_run() -> None:
    for name, what in long_runs.MAY_GROW:
        assert name in long_runs.RUNS
        assert what in long_runs.NOISE


def test_the_page_shows_the_newest_record() -> None:
    text = long_runs.PAGE.read_text(encoding="utf-8")
    assert long_runs.page(text, long_runs.newest()) == text, "python benchmarks/long_runs.py --page"


def measure(out: Path, *words: str) -> tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]]:
    """Returns the ended command, and the rows of its record."""
    command = [sys.executable, str(long_runs.ROOT / "benchmarks" / "long_runs.py"), *words, "--out", str(out)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert out.exists(), done.stderr
    return done, json.loads(out.read_text())["results"]


SMALL = {"steps": 24_000, "epochs": 100, "validations": 200, "checkpoints": 200, "trials": 12, "hours": 24}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_small_runs_are_watched_and_read(tmp_path: Path) -> None:
    sizes = [word for name, size in SMALL.items() for word in (f"--{name}", str(size))]
    done, rows = measure(tmp_path / "record.json", *sizes)
    assert not [row for row in rows if long_runs.is_bad(row)], done.stdout
    assert done.returncode == 0, done.stderr
    by_run = {name: {row["what"]: row for row in rows if row["run"] == name} for name in SMALL}
    for name, found in by_run.items():
        assert found["whole"]["size"] == SMALL[name]
        assert set(long_runs.NOISE) < set(found)
        assert {"runs", "report", "diagnose", "leaderboard"} & set(found)
    assert by_run["hours"]["folder_kib"]["verdict"] == "as documented"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("plant", "what"), [("memory", "uss_kib"), ("handles", "handles")])
def test_a_planted_leak_is_found(plant: str, what: str, tmp_path: Path) -> None:
    done, rows = measure(tmp_path / "record.json", "--only", "steps", "--steps", "60000", "--plant", plant)
    assert done.returncode == 1
    assert what in [row["what"] for row in rows if row["verdict"] == "GROWS"], done.stdout
    assert f"steps: {what} GROWS" in done.stdout
