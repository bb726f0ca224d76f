"""What a training that is only timed leaves out of its figures."""

from __future__ import annotations

import pytest

from wellfed.app.passes import loaded_ahead
from wellfed.planning.planned import Planned, RunPlan


def plan(num_workers: int, prefetch_factor: int | None, device_prefetch: int | None) -> RunPlan:
    knobs = {
        "loader.num_workers": num_workers,
        "loader.prefetch_factor": prefetch_factor,
        "loader.device_prefetch": device_prefetch,
    }
    return RunPlan({name: Planned(value, "", "set") for name, value in knobs.items()}, None, False, "device")


@pytest.mark.parametrize(
    ("num_workers", "prefetch_factor", "device_prefetch", "batches"),
    [(0, None, 0, 0), (0, None, None, 0), (0, 4, 0, 0), (2, 4, 0, 8), (3, None, 2, 2), (2, 8, 4, 20)],
)
def test_so_many_batches_may_be_loaded_before_the_first_step_ends(
    num_workers: int, prefetch_factor: int | None, device_prefetch: int | None, batches: int
) -> None:
    assert loaded_ahead(plan(num_workers, prefetch_factor, device_prefetch)) == batches
