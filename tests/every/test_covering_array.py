"""Every workload under every option of gpu, loader and memory: each pair of options meets in a run of two steps."""

import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.end_to_end.commands import record_of, run
from tests.every.covering_array import Row, all_pairs, covering_array, pairs_of
from wellfed.config.compose import compose

CONFIGS = Path(__file__).parents[2] / "configs"
OWN = "own"
"""A loader that leaves a DataLoader as it came; none of these workloads brings one."""


def stems(group: str) -> list[str]:
    return sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))


GROUPS = ("gpu", "loader", "memory", "workload")
OPTIONS = {group: [stem for stem in stems(group) if stem != OWN] for group in GROUPS}
ROWS = covering_array(OPTIONS)


def words(row: Mapping[str, str]) -> list[str]:
    """Returns the overrides. Dropout draws its masks by micro-batch, so it is off where runs are compared."""
    model = yaml.safe_load((CONFIGS / "workload" / f"{row['workload']}.yaml").read_text())["model"]
    return [f"{group}={option}" for group, option in row.items()] + ["workload.model.dropout=0.0"] * (
        "dropout" in model
    )


def name_of(row: Row) -> str:
    return " ".join(row[group] for group in GROUPS)


@given(st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 5), min_size=2))
def test_all_pairs_meet(sizes: dict[str, int]):
    options = {name: [str(value) for value in range(size)] for name, size in sizes.items()}
    rows = covering_array(options)
    met = {pair for row in rows for pair in pairs_of(row)}
    assert met == set(all_pairs(options))
    assert all(list(row) == list(options) for row in rows)
    longest = sorted(sizes.values())[-2:]
    assert math.prod(longest) <= len(rows) <= 2 * math.prod(longest) + len(sizes)
    assert rows == covering_array(options)


def test_the_options_are_those_of_the_configuration():
    assert [len(OPTIONS[group]) for group in GROUPS[:3]] == [6, 5, 6]
    assert len(OPTIONS["workload"]) >= 1
    assert set(stems("loader")) - set(OPTIONS["loader"]) == {OWN}
    assert len(ROWS) < 2 * len(OPTIONS["gpu"]) * len(OPTIONS["memory"])
    assert {row["workload"] for row in ROWS} == set(OPTIONS["workload"])


@pytest.mark.parametrize("row", ROWS[::12], ids=name_of)
def test_they_compose(row: Row):
    assert {group: compose(words(row)).choices[group] for group in GROUPS} == row


@cache
def losses(workload: str) -> dict[str, float]:
    """Returns the losses of the runs so far, by their names."""
    return {}


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for all runs, as a user has it."""
    return tmp_path_factory.mktemp("kept")


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_they_run_and_learn_the_same(row: Row, kept: Path, tmp_path: Path):
    quick = ("trainer.max_steps=2", "trainer.limit_batches=2", "logger=none", "telemetry=none")
    done = run("train.py", *words(row), *quick, f"paths.cache_dir={kept}", "hydra.run.dir=run", cwd=tmp_path)
    assert done.code == 0, done.text
    record = record_of(tmp_path / "run")
    assert (record["status"], record["workload"], record["steps"]) == ("ok", row["workload"], 2)
    planned = record["plan"]["memory.features"]["value"]
    if planned is not None and row["memory"] in ("cache", "cache_host", "dynamic"):
        assert planned == row["memory"]
    known = losses(row["workload"])
    known[name_of(row)] = record["metrics"]["train/loss"]
    (name, first), *_ = known.items()
    assert known[name_of(row)] == pytest.approx(first, rel=1e-4), f"{name_of(row)} is not {name}"
