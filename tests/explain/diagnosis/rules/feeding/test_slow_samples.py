"""Few samples that take very long, each time that they are read."""

import numpy as np
import pytest

from tests.kit.loader_evidence import fed_by
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.rules.feeding_rules import slow_samples, waiting_for_data

SLOW = np.isin(np.arange(200), (30, 77, 130, 177))
EPOCH = np.repeat([0.0, 1.0], 100)


def slow_at(indices, *, slow=SLOW, epoch=EPOCH, workers=4, **more):
    """Steps in which the samples of ``indices`` were the slowest of their batches, and took nearly all of the time."""
    index, slowest = np.arange(200.0) + 500, np.where(slow, 895.0, 0.2)
    index[slow] = indices
    run = fed_by(workers, build_ms=np.where(slow, 900.0, 5.0), wait_ms=np.where(slow, 850.0, 0.0), epoch=epoch, **more)
    run.all_steps.update({"slowest_index": index, "slowest_ms": slowest, "samples": np.full(200, 8.0)})
    return run


def test_samples_that_were_slow_in_two_epochs_are_named():
    found = slow_samples(slow_at([17, 203, 203, 17]))
    assert "100.0 % of that in 4 steps of 200, up to 850 ms each" in found.message
    assert "The same samples were slow in more than one epoch: 17, 203" in found.message
    assert "loader.skip_ids" in found.advice
    assert found.evidence["samples_slow_twice"] == 2
    assert waiting_for_data(slow_at([17, 203, 203, 17])) is None


@pytest.mark.parametrize(
    "run",
    [
        slow_at([17, 203, 45, 99]),
        slow_at([17, 203, 45, 99], epoch=np.zeros(200)),
        fed_by(4, build_ms=np.where(SLOW, 900.0, 5.0), wait_ms=np.where(SLOW, 850.0, 0.0)),  # of whole batches
    ],
)
def test_samples_that_were_not_slow_twice_are_not_blamed(run: Evidence) -> None:
    assert slow_samples(run) is None
    found = waiting_for_data(run)
    assert "random latency" in found.message
    assert "skip_ids" not in found.text


def test_samples_that_were_left_out_are_noted():
    events = [{"kind": "sample_skipped", "step": 3, "time_s": 1.0, "index": 17, "reason": "hung"}]
    found = slow_samples(fed_by(2, build_ms=5.0, events=events))
    assert found.is_note
    assert found.message.startswith("1 sample left out that could not be loaded: 17.")
    many = slow_samples(fed_by(2, build_ms=5.0, events=[{**events[0], "left_out": 40}]))
    assert many.message.startswith("41 samples left out that could not be loaded: 17.")
    del events[0]["index"]
    unnamed = slow_samples(fed_by(2, build_ms=5.0, events=events))
    assert unnamed.message == "1 sample left out that could not be loaded. Finding each of them took time."
    slow = slow_samples(slow_at([17, 203, 203, 17], events=events))
    assert not slow.is_note
    assert "17, 203" in slow.message


def test_one_slow_step_and_many_are_another_matter():
    once = np.arange(200) == 30
    assert slow_samples(fed_by(4, build_ms=np.where(once, 900.0, 5.0), wait_ms=850.0 * once)) is None
    assert slow_samples(fed_by(1, build_ms=200.0)) is None


def test_the_smallest_queue_is_advised_that_bridges_random_latency_nearly_as_well():
    late = np.arange(200) % 20 == 7
    run = fed_by(
        4, build_ms=np.where(late, 120.0, 5.0), wait_ms=np.where(late, 105.0, 0.0), loader={"prefetch_factor": 1}
    )
    found = waiting_for_data(run)
    assert "random latency" in found.message
    assert found.change == ("loader.prefetch_factor=4",)
