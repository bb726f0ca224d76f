"""What `benchmarks/memory_accuracy.py` makes of its peaks; `test_estimate.py` holds them to bounds."""

from dataclasses import replace

import pytest

from benchmarks import memory_accuracy
from benchmarks.memory_cases import cases


@pytest.mark.slow
def test_rows_of_a_model():
    case = replace(next(cases()), sizes=(16, 512))
    rows = list(memory_accuracy.compare(case, "32-true"))
    assert [(row["micro_batch"], row["samples"]) for row in rows] == list(memory_accuracy.steps(case))
    assert len(rows) == 3
    assert all(row["counted_mib"] > 1 for row in rows)
    assert rows[-1]["counted_mib"] > rows[0]["counted_mib"]


def test_summary():
    found = memory_accuracy.summary([0.0, -0.005, -0.02, 0.04])
    assert found["n"] == 4
    assert found["error_frac_median"] == pytest.approx(0.0125)
    assert found["error_frac_worst"] == 0.04
    assert found["under_predicted_frac"] == 0.25
