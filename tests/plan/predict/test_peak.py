import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wellfed.plan.predict.peak import (
    Footprint,
    Point,
    StepShape,
    largest_micro_batch,
    predicted_peak,
)


def footprint(points=((1, 10, 30, 12), (4, 50, 10, 50), (8, 100, 0, 100)), **more):
    """Parameters 100, gradients 40, state 80, temporaries 40; an input of 2 a sample."""
    parts = {
        "parameters": 100,
        "gradients": 40,
        "optimizer_state": 80,
        "optimizer_temporaries": 40,
        "feature_table": 0,
        "filling": 0,
        "inputs": (2,),
    }
    return Footprint(**{**parts, **more}, points=tuple(Point(*point) for point in points))


def at(micro_batch, samples, *, of=None, **more):
    return predicted_peak(of or footprint(), micro_batch, StepShape(samples, **more))


def test_the_optimizer_is_the_peak_of_small_batches():
    found = at(1, 1)
    assert found.moment == "optimizer step"
    assert {name: size for name, size in found.parts.items() if size} == {
        "parameters": 100,
        "optimizer state": 80,
        "inputs": 2,
        "gradients": 40,
        "optimizer temporaries": 40,
    }
    assert found.tensor_bytes == 262
    assert at(1, 1, average=100).parts["weight average"] == 100
    assert at(1, 1, average=100).tensor_bytes == 362


@pytest.mark.parametrize(
    ("micro_batch", "samples", "gradients", "activations"),
    [
        (8, 8, 0, 100),  # alone, as measured
        (6, 6, 5, 75),  # alone, between two points
        (6, 60, 40, 75),  # gradients of others before it stay
        (4, 8, 40, 50),
    ],
)
def test_a_pass_is_the_peak_of_large_ones(micro_batch, samples, gradients, activations):
    found = at(micro_batch, samples)
    assert found.moment == "forward and backward"
    assert found.parts["gradients"] == gradients
    assert found.parts["activations"] == activations
    assert found.parts["inputs"] == 2 * samples


def test_filling_the_table_can_be_the_peak():
    found = at(1, 1, of=footprint(feature_table=500, filling=900))
    assert found.moment == "filling the feature table"
    assert found.tensor_bytes == 100 + 500 + 900
    found = at(1, 1, of=footprint(feature_table=500, filling=100))
    assert found.moment == "optimizer step"
    assert found.parts["feature table"] == 500


def test_more_devices():
    assert at(8, 8, world_size=2).parts["gradient buckets"] == 40
    assert at(8, 8).parts["gradient buckets"] == 0


def test_the_largest_micro_batch():
    budget = 100 + 80 + 2 * 64
    assert largest_micro_batch(footprint(), budget + 40 + 40, StepShape(64)) == 3
    assert largest_micro_batch(footprint(), budget + 39 + 40, StepShape(64)) == 0  # not even the optimizer's step
    assert largest_micro_batch(footprint(), budget + 40 + 100, StepShape(64)) == 8
    assert largest_micro_batch(footprint(), 2**40, StepShape(64)) == 64
    straight = footprint([(1, 10, 0, 10), (2, 20, 0, 20), (4, 40, 0, 40)])
    assert largest_micro_batch(straight, 2**40, StepShape(64)) == 64
    assert largest_micro_batch(footprint(), 2 * 64, StepShape(64)) == 0


def test_unsplit_may_need_less_than_in_two_parts():
    of = footprint([(1, 100, 0, 100), (2, 101, 0, 101), (3, 102, 0, 102)])
    whole, parted = at(3, 3, of=of).tensor_bytes, at(2, 3, of=of).tensor_bytes
    assert whole < parted
    assert largest_micro_batch(of, whole, StepShape(3)) == 3


sizes = st.integers(0, 10**12)


@st.composite
def footprints(draw):
    """Peaks as they are: the highest of lines of the micro-batch."""
    lines = draw(st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**6)), min_size=1, max_size=4))
    at_sizes = sorted(draw(st.sets(st.integers(1, 5000), min_size=1, max_size=6)))
    points = [(size, max(start + slope * size for start, slope in lines)) for size in at_sizes]
    values = {spec.name: draw(sizes) for spec in dataclasses.fields(Footprint) if spec.type == "int"}
    return footprint([(size, peak, 0, peak) for size, peak in points], **values)


@given(of=footprints(), samples=st.integers(1, 5000), data=st.data())
def test_a_peak_never_falls_with_the_micro_batch_and_holds_all_its_parts(of, samples, data):
    one, two = sorted(data.draw(st.integers(1, samples)) for _ in range(2))
    step = StepShape(samples, batches_ahead=data.draw(st.integers(0, 4)))
    peaks = [predicted_peak(of, size, step) for size in (one, two)]
    if two < samples:
        assert peaks[0].tensor_bytes <= peaks[1].tensor_bytes
    for peak in peaks:
        assert min(peak.parts.values()) >= 0
        assert peak.tensor_bytes >= of.parameters + of.feature_table


@given(of=footprints(), samples=st.integers(1, 5000), budget=st.integers(0, 10**13))
def test_the_largest_fits_and_the_next_does_not(of, samples, budget):
    step = StepShape(samples)
    found = largest_micro_batch(of, budget, step)
    assert 0 <= found <= samples
    if found:
        assert predicted_peak(of, found, step).tensor_bytes <= budget
    if found < samples:
        assert predicted_peak(of, found + 1, step).tensor_bytes > budget
