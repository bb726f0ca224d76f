import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.footprints import MIB, estimate
from wellfed.contract import FEATURE_MODES
from wellfed.plan.memory_candidates import SearchSpace, cheapest, limit_bytes, remedies
from wellfed.plan.predict.peak import NoEstimate, StepShape

GIB = 2**30


def space(features=(None,), checkpointed=(False, True), micro=None, samples=64, at_most=None, **step):
    return SearchSpace(features, checkpointed, micro, at_most or samples, StepShape(samples, **step))


@given(
    budget_gib=st.floats(0.5, 40),
    per_sample=st.integers(1, 400),
    table=st.integers(0, 8000),
    encoder=st.integers(0, 400),
    samples=st.integers(1, 512),
    features=st.sampled_from([FEATURE_MODES, ("cache_host", "dynamic"), ("dynamic",)]),
)
def test_the_first_candidate_that_fits_is_taken_with_the_most_that_fit(
    budget_gib, per_sample, table, encoder, samples, features
):
    sizes = {"per_sample": per_sample * MIB, "table": table * MIB, "encoder": encoder * MIB}
    asked = space(features, samples=samples)
    found = cheapest(asked, estimate(**sizes), budget_gib)
    limit = limit_bytes(budget_gib)
    assert found.candidate.fits == (found.candidate.peak.reserved_bytes <= limit)
    order = list(itertools.product(features, (False, True)))
    if found.candidate.fits:
        place = order.index((found.candidate.features, found.candidate.checkpointed))
        assert [(candidate.features, candidate.checkpointed) for candidate in found.passed_over] == order[:place]
        if found.candidate.micro_batch < samples:
            one_more = cheapest(
                space(
                    (found.candidate.features,),
                    (found.candidate.checkpointed,),
                    found.candidate.micro_batch + 1,
                    samples,
                ),
                estimate(**sizes),
                budget_gib,
            )
            assert not one_more.candidate.fits
    else:
        assert len(found.passed_over) == len(order)
        assert all(candidate.peak.reserved_bytes > limit for candidate in found.passed_over)


def test_without_a_budget_everything_fits_unsplit():
    found = cheapest(space(FEATURE_MODES), estimate(per_sample=100 * GIB), None)
    assert (found.candidate.fits, found.candidate.features, found.candidate.micro_batch) == (True, "cache", 64)


def test_a_micro_batch_that_is_given_is_the_only_one():
    found = cheapest(space(micro=64, checkpointed=(False,)), estimate(per_sample=100 * MIB), 4)
    assert (found.candidate.fits, found.candidate.micro_batch) == (False, 64)


def test_no_estimate_says_why_and_refuses_nothing():
    found = cheapest(space(), lambda mode, checkpointed: NoEstimate("the model asks for values"), 4)
    assert (found.candidate, found.no_estimate) == (None, "the model asks for values")


@pytest.mark.parametrize("may_split", [True, False])
def test_remedies_fit_and_begin_with_the_cheapest(may_split):
    # 64 samples at 100 MiB are 6.4 GiB beside 0.8 GiB; checkpointed they are 1.6.
    asked = space(("cache",), (False,), micro=64)
    found = remedies(
        asked, estimate(per_sample=100 * MIB), 4, features=FEATURE_MODES, may_split=may_split, has_blocks=True
    )
    assert all(candidate.peak.reserved_bytes <= limit_bytes(4) for candidate in found)
    first = found[0]
    assert (first.features, first.checkpointed) == ("cache", not may_split)
    assert (first.micro_batch < 64) == may_split
    assert [candidate.features for candidate in found] == sorted(
        [candidate.features for candidate in found], key=FEATURE_MODES.index
    )


def test_what_the_model_can_not_do_is_no_remedy():
    asked = space(("cache",), (False,), micro=64)
    found = remedies(asked, estimate(per_sample=100 * MIB), 4, features=("cache",), may_split=False, has_blocks=False)
    assert found == []
