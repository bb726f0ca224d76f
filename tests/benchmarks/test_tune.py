"""What `benchmarks/tune.py` makes of its runs, whose commands are played."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks import tune
from benchmarks.tune import Bench, Case
from tests.kit.made_rows import write_rows
from wellfed.study.rows import Row


def test_both_are_first_in_every_other_round_and_rates_stay_with_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def play(bench: Bench, script: str, *words: str) -> None:
        """Each point is a little slower than the one before it."""
        (axis,) = [word for word in words if word.startswith("experiment=")]
        order.extend(axis.partition("=")[2].split(","))
        folder = bench._logs / "sweeps" / "turns_cpu_guide"
        folder.mkdir(parents=True)
        rows = [
            Row(
                str(number),
                "trial",
                (f"experiment={name}", "seed=1"),
                "ok",
                1,
                exit_code=0,
                samples_per_s=100.0 - number,
            )
            for number, name in enumerate(order)
        ]
        write_rows(folder, rows)

    monkeypatch.setattr(Bench, "_type", play)
    bench = Bench(Case("recsys", "cpu", "guide"), tmp_path, {}, steps=20, compiles=False)
    tuned, grid = bench.in_turns(["loader=auto", "loader.num_workers=2"], ["loader=baseline"], 3)
    assert [name.rpartition("_")[2] for name in order] == ["tuned", "grid", "grid", "tuned", "tuned", "grid"]
    assert (tuned, grid) == ([100.0, 97.0, 96.0], [99.0, 98.0, 95.0])
    files = {path.stem: yaml.safe_load(path.read_text()) for path in (tmp_path / "options").rglob("*.yaml")}
    assert set(files) == set(order)
    assert files[order[0]] == {"defaults": [{"override /loader": "auto"}], "loader": {"num_workers": 2}}
    assert files[order[1]] == {"defaults": [{"override /loader": "baseline"}]}


def test_the_record_says_what_the_comparison_took_beside_the_search() -> None:
    row: dict[str, Any] = {"case": "recsys/cpu/guide", "of_best": 1.0, "of_time": 0.2, "grid_trial_s": 100.0}
    said = tune.in_words([{**row, "tune_comparison_s": 30.0}])
    assert "in 1 of 1 cases: 1.00 of the rate in 0.20 of the time (medians), without its own comparison" in said
    assert said.endswith("which took 0.30 more.")
