import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.planning.footprints import MIB, estimate
from wellfed.footprint.footprint import NoEstimate, StepShape
from wellfed.planning.memory_candidates import FEATURE_MODES, Choice, cheapest, limit_bytes, remedies

GIB = 2**30


def choice(features=(None,), checkpointed=(False, True), micro=None, samples=64, at_most=None, **step):
    return Choice(features, checkpointed, micro, at_most or samples, StepShape(samples, **step))


@given(
    budget_gib=st.floats(0.5, 40),
    per_sample=st.integers(1, 400),
    table=st.integers(0, 8000),
    encoder=st.integers(0, 400),
    samples=st.integers(1, 512),
    features=st.sampled_from([FEATURE_MODES, ("cache_host", "dynamic"), ("dynamic",)]),
)
def test_the_first_way_that_fits_is_taken_with_the_most_that_fit(
    budget_gib, per_sample, table, encoder, samples, features
):
    sizes = {"per_sample": per_sample * MIB, "table": table * MIB, "encoder": encoder * MIB}
    asked = choice(features, samples=samples)
    found = cheapest(asked, estimate(**sizes), budget_gib)
    limit = limit_bytes(budget_gib)
    assert found.fits == (found.way.peak.reserved_bytes <= limit)
    order = list(itertools.product(features, (False, True)))
    if found.fits:
        place = order.index((found.way.features, found.way.checkpointed))
        assert [(way.features, way.checkpointed) for way in found.passed_over] == order[:place]
        if found.way.micro_batch < samples:
            one_more = cheapest(
                choice((found.way.features,), (found.way.checkpointed,), found.way.micro_batch + 1, samples),
                estimate(**sizes),
                budget_gib,
            )
            assert not one_more.fits
    else:
        assert len(found.passed_over) == len(order)
        assert all(way.peak.reserved_bytes > limit for way in found.passed_over)


def test_without_a_budget_everything_fits_unsplit():
    found = cheapest(choice(FEATURE_MODES), estimate(per_sample=100 * GIB), None)
    assert (found.fits, found.way.features, found.way.micro_batch) == (True, "cache", 64)


def test_a_micro_batch_that_is_given_is_the_only_one():
    found = cheapest(choice(micro=64, checkpointed=(False,)), estimate(per_sample=100 * MIB), 4)
    assert (found.fits, found.way.micro_batch) == (False, 64)


def test_no_estimate_says_why_and_refuses_nothing():
    found = cheapest(choice(), lambda mode, checkpointed: NoEstimate("the model asks for values"), 4)
    assert (found.way, found.fits, found.no_estimate) == (None, True, "the model asks for values")


@pytest.mark.parametrize("may_split", [True, False])
def test_remedies_fit_and_begin_with_the_cheapest(may_split):
    # 64 samples at 100 MiB are 6.4 GiB beside 0.8 GiB; checkpointed they are 1.6.
    asked = choice(("cache",), (False,), micro=64)
    found = remedies(asked, estimate(per_sample=100 * MIB), 4, has_features=True, may_split=may_split, has_blocks=True)
    assert all(way.peak.reserved_bytes <= limit_bytes(4) for way in found)
    first = found[0]
    assert (first.features, first.checkpointed) == ("cache", not may_split)
    assert (first.micro_batch < 64) == may_split
    assert [way.features for way in found] == sorted([way.features for way in found], key=FEATURE_MODES.index)


def test_what_the_model_can_not_do_is_no_remedy():
    asked = choice(("cache",), (False,), micro=64)
    found = remedies(asked, estimate(per_sample=100 * MIB), 4, has_features=False, may_split=False, has_blocks=False)
    assert found == []
