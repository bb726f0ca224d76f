import random

from hypothesis import example, given
from hypothesis import strategies as st

from tests.kit.cards import GIB, Card, cards
from tests.kit.examples import examples
from wellfed.plan.predict.size_search import MAX_PROBES, search


def largest_by_search(card, max_size=10**6):
    return search(card.probe, max_size=max_size, budget_bytes=card.budget)


# Rounding makes the slope seem steeper: the line ends at 31, and 32 fit.
GOOD_FRAC = 0.85
"""A size that is good enough, as a share of the largest that fits."""
STEEPER_BY_ROUNDING = Card(3221225472, rest=1530082099, fixed=765041049, optimizer=0, per_sample=23884208.4)


@examples(150)
@given(cards())
@example(STEEPER_BY_ROUNDING)
def test_the_largest_that_fits_is_found_in_six_probes_on_any_card(card):
    fit, best = largest_by_search(card), card.largest()
    assert fit.size is not None, (card, best)
    assert len(card.tried) <= MAX_PROBES
    assert fit.size in card.tried, "it was itself run"
    assert card.fits(fit.size)
    assert fit.size >= GOOD_FRAC * best
    assert fit.stopped_by == "budget"


@examples(50)
@given(cards(), st.integers(0, 2**32))
def test_no_step_of_the_next_200_runs_out_of_memory(card, seed):
    """Kernels' workspaces and odd batches need some more now and then: up to 3 % here."""
    noise, size = random.Random(seed), largest_by_search(card).size
    assert all(card.needs(size, more=noise.uniform(0.99, 1.03)).total <= card.budget for _ in range(200))


@examples(25)
@given(cards(), st.integers(1, 500))
def test_a_step_that_fits_whole_is_not_split(card, max_size):
    best = card.largest()
    fit = largest_by_search(card, max_size)
    assert fit.size <= max_size
    assert all(size <= max_size for size in card.tried)
    if best >= max_size:
        assert fit.size >= GOOD_FRAC * max_size


def card(**changes):
    given = {"budget": 8 * GIB, "rest": GIB, "fixed": 0, "optimizer": GIB, "per_sample": 0.1 * GIB}
    return Card(**{**given, **changes})


def test_one_sample_that_does_not_fit_ends_the_search_at_once():
    big = card(per_sample=20 * GIB)
    fit = largest_by_search(big)
    assert (fit.size, fit.stopped_by, big.tried) == (None, "nothing fits", [2, 1])
