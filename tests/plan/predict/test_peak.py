import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wellfed.plan.predict.peak import (
    Footprint,
    Point,
    StepShape,
    fits_within,
    largest_micro_batch,
    needed_bytes,
    predicted_peak,
)
from wellfed.plan.predict.replay import Recording, Trace

MIB = 2**20
WORKSPACES = 8 * MIB


def footprint(points=((1, 10, 30, 12), (4, 50, 10, 50), (8, 100, 0, 100)), **more):
    """Parameters 100, gradients 40, state 80, temporaries 40; an input of 2 a sample."""
    parts = {
        "basis": "fake tensors",
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
    assert found.reserved_bytes == 262
    assert at(1, 1, workspaces=WORKSPACES).reserved_bytes == 262 + WORKSPACES
    assert at(1, 1, average=100).parts["weight average"] == 100
    assert at(1, 1, average=100).reserved_bytes == 362


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


def test_the_line_goes_on_only_where_two_slopes_agree():
    straight = footprint([(1, 10, 0, 10), (2, 20, 0, 20), (4, 40, 0, 40)])
    assert straight.reach is None
    assert at(100, 100, of=straight).parts["activations"] == 1000
    bent = footprint([(1, 10, 0, 10), (2, 20, 0, 20), (4, 43, 0, 43)])
    assert bent.reach == 4
    with pytest.raises(ValueError, match=r"micro_batch 5 is not in 1\.\.4"):
        at(5, 5, of=bent)
    assert footprint([(1, 100, 0, 100), (2, 200, 0, 200), (4, 409, 0, 409)]).reach is None  # 4.3 %
    assert footprint([(3, 10, 0, 10)]).reach == 3
    with pytest.raises(ValueError, match="micro_batch 0"):
        at(0, 5)


def test_below_the_first_point_its_value_is_taken():
    assert at(1, 99, of=footprint([(2, 900, 0, 900), (4, 1800, 0, 1800)])).parts["activations"] == 900


def test_batches_ahead_lie_on_the_device_whole():
    assert at(8, 64, batches_ahead=2).parts["inputs"] == 3 * 64 * 2


def test_filling_the_table_can_be_the_peak():
    found = at(1, 1, of=footprint(feature_table=500, filling=900))
    assert found.moment == "filling the feature table"
    assert found.tensor_bytes == 100 + 500 + 900
    found = at(1, 1, of=footprint(feature_table=500, filling=100))
    assert found.moment == "optimizer step"
    assert found.parts["feature table"] == 500


def test_more_devices():
    assert at(8, 8, world_size=2).parts["gradient buckets"] == 40
    assert at(8, 8, world_size=2, room_for_sums=30).parts["gradient buckets"] == 70
    assert at(8, 8, world_size=2, room_for_sums=100).parts["gradient buckets"] == 80
    assert at(8, 8, room_for_sums=100).parts["gradient buckets"] == 0
    sharded = at(4, 8, world_size=4, is_sharded=True)
    assert sharded.parts["gradient buckets"] == 0
    assert sharded.parts["parameters"] == 25
    assert sharded.parts["optimizer state"] == 20
    assert sharded.parts["gradients"] == 10
    assert sharded.parts["activations"] == 50
    assert at(4, 8, world_size=4, is_sharded=True, gathered=70).parts["gathered weights"] == 70
    assert at(4, 8, world_size=4, gathered=70).tensor_bytes == at(4, 8, world_size=4).tensor_bytes
    filling = at(1, 1, of=footprint(feature_table=500, filling=900), world_size=4, is_sharded=True)
    assert filling.tensor_bytes == 25 + 100 + 500 + 900  # for that the whole model is there


def test_the_largest_micro_batch():
    budget = 100 + 80 + 2 * 64
    assert largest_micro_batch(footprint(), budget + 40 + 40, StepShape(64)) == 3
    assert largest_micro_batch(footprint(), budget + 39 + 40, StepShape(64)) == 0  # not even the optimizer's step
    assert largest_micro_batch(footprint(), budget + 40 + 100, StepShape(64)) == 8
    assert largest_micro_batch(footprint(), 2**40, StepShape(64)) == 8  # no further than is known
    straight = footprint([(1, 10, 0, 10), (2, 20, 0, 20), (4, 40, 0, 40)])
    assert largest_micro_batch(straight, 2**40, StepShape(64)) == 64
    assert largest_micro_batch(footprint(), 2 * 64, StepShape(64)) == 0


def test_unsplit_may_need_less_than_in_two_parts():
    of = footprint([(1, 100, 0, 100), (2, 101, 0, 101), (3, 102, 0, 102)])
    whole, parted = at(3, 3, of=of).reserved_bytes, at(2, 3, of=of).reserved_bytes
    assert whole < parted
    assert largest_micro_batch(of, whole, StepShape(3)) == 3


def test_it_goes_through_json():
    of = footprint()
    assert Footprint.from_dict(json.loads(json.dumps(of.to_dict()))) == of


@pytest.mark.parametrize(
    "change",
    [
        {"format": 0},
        {"points": []},
        {"points": [[1, 2, 3, 4]]},
        {"points": 3},
        {"parameters": "100"},
        {"gradients": -1},
        {"unknown": 1},
    ],
)
def test_what_is_no_footprint_is_refused(change):
    with pytest.raises(ValueError, match=r"footprint|format"):
        Footprint.from_dict({**footprint().to_dict(), **change})
    with pytest.raises(ValueError, match="not a footprint"):
        Footprint.from_dict([])


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
    reach = of.reach or samples
    one, two = sorted(data.draw(st.integers(1, min(reach, samples))) for _ in range(2))
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
    top = min(samples, of.reach or samples)
    assert 0 <= found <= top
    if found:
        assert predicted_peak(of, found, step).reserved_bytes <= budget
    if found < top:
        assert predicted_peak(of, found + 1, step).reserved_bytes > budget


@given(of=footprints())
def test_every_footprint_goes_through_json(of):
    assert Footprint.from_dict(json.loads(json.dumps(of.to_dict()))) == of


def recording(micro=12 * MIB, state=6 * MIB, **more):
    """A tensor a sample, beside parameters of 4 MiB and a state that is made after the first pass."""
    one, eight = (((1, size * micro), (1, 0)) for size in (1, 8))
    empty = Trace.through({8: ()})
    return Recording((4 * MIB,), (), Trace.through({1: one, 8: eight}), empty, ((9, state),), empty, **more)


def large(**more):
    points = tuple((size, size * 12 * MIB, 0, size * 12 * MIB) for size in (1, 4, 8))
    given = {"gradients": 0, "parameters": 4 * MIB, "optimizer_state": 6 * MIB, "optimizer_temporaries": 0}
    return footprint(points, **{**given, "inputs": (5 * MIB,), "recording": recording(), **more})


def test_what_is_reserved_comes_from_a_replay():
    of = large()
    # A segment for parameters, state and inputs; in the first step the state has split it.
    assert at(8, 8, of=of).tensor_bytes == (4 + 6 + 8 * 5 + 96) * MIB
    assert at(8, 8, of=of).reserved_bytes == (20 + 40 + 96) * MIB
    assert at(8, 8, of=of, batches_ahead=1).reserved_bytes == (20 + 2 * 40 + 96) * MIB
    assert at(8, 8, of=large(inputs=())).reserved_bytes == (20 + 96) * MIB
    expandable = large(recording=recording(expandable=True))
    assert at(8, 8, of=expandable).reserved_bytes == 160 * MIB  # pages of 20 MiB


def test_an_evaluation_copies_its_batches_ahead_to_segments_of_its_own():
    of, ahead = large(), {"batches_ahead": 1}

    def reserved(**more):
        return at(8, 8, of=of, **more).reserved_bytes

    alone = reserved(**ahead)
    assert reserved(**ahead, num_eval=100) == alone + 2 * 40 * MIB  # as large as the micro-batch
    assert reserved(**ahead, num_eval=100, eval_batch_size=1) == alone + 20 * MIB  # two of 5 MiB
    assert reserved(**ahead, num_eval=9) == alone + 2 * 40 * MIB
    assert reserved(**ahead, num_eval=8) == alone + 40 * MIB  # a single batch
    ranks = {**ahead, "world_size": 4}
    assert reserved(**ranks, num_eval=16) == reserved(**ranks) + 40 * MIB  # one of two batches
    assert reserved(num_eval=100) == reserved()  # copied on the stream of the step
    assert at(8, 8, of=of, **ahead, num_eval=100).tensor_bytes == at(8, 8, of=of, **ahead).tensor_bytes


def test_where_memory_is_short_the_allocator_gives_the_segments_of_an_evaluation_back():
    of, step = large(), StepShape(8, batches_ahead=1)
    alone, evaluates = predicted_peak(of, 8, step).reserved_bytes, dataclasses.replace(step, num_eval=100)
    assert fits_within(of, 8, evaluates, alone)
    assert needed_bytes(of, 8, evaluates) == pytest.approx(needed_bytes(of, 8, step), rel=0.01)
    assert largest_micro_batch(of, alone, evaluates) == largest_micro_batch(of, alone, step) == 8


def test_what_must_be_reserved_may_be_less():
    """In the first step the state splits the segment of the pass, so that the second takes another."""
    of = large(recording=recording(state=30 * MIB), optimizer_state=30 * MIB, inputs=())
    step = StepShape(8)
    freely = predicted_peak(of, 8, step).reserved_bytes
    assert freely == (20 + 96 + 96) * MIB
    assert needed_bytes(of, 8, step) == pytest.approx(freely, rel=0.01)
    wide = recording(state=1)
    step_alone = Trace.through({8: ((5, 90 * MIB), (5, 0))})
    of = large(
        recording=dataclasses.replace(wide, first_step=((5, 90 * MIB), (5, 0), (9, 1)), step=step_alone),
        optimizer_temporaries=90 * MIB,
        optimizer_state=512,
        inputs=(),
    )
    step = StepShape(4)
    assert predicted_peak(of, 4, step).reserved_bytes == (20 + 48 + 90 + 2) * MIB
    needed = needed_bytes(of, 4, step)
    assert (20 + 90) * MIB < needed < 115 * MIB
    assert fits_within(of, 4, step, needed)
    assert not fits_within(of, 4, step, 100 * MIB)
    assert largest_micro_batch(of, needed, step) == 4


def test_a_recording_goes_through_json_too():
    of = large()
    assert Footprint.from_dict(json.loads(json.dumps(of.to_dict()))) == of
    with pytest.raises(ValueError, match="not a footprint"):
        Footprint.from_dict({**of.to_dict(), "recording": {"resident": []}})
