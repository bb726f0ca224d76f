import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wellfed.study.tune_gain import gain_in_turns

RATES = st.floats(1e-3, 1e6)


@given(st.lists(st.tuples(RATES, RATES), min_size=2, max_size=8), st.floats(0.1, 10))
def test_the_gain_is_that_of_the_ratios_whatever_the_machine_did_between_rounds(
    rounds: list[tuple[float, float]], speed: float
) -> None:
    before, after = [one for one, _ in rounds], [other for _, other in rounds]
    found = gain_in_turns(before, after)
    assert found is not None
    assert found.ci95 is not None
    assert found.rounds == len(rounds)
    assert found.ci95[0] <= found.factor * (1 + 1e-9)
    assert found.factor <= found.ci95[1] * (1 + 1e-9)
    assert math.log(found.factor) == pytest.approx(
        sum(math.log(new / old) for old, new in rounds) / len(rounds), abs=1e-9
    )
    slowed = gain_in_turns([one * speed for one in before], [one * speed for one in after])
    assert slowed is not None
    assert slowed.factor == pytest.approx(found.factor)
    back = gain_in_turns(after, before)
    assert back is not None
    assert back.factor == pytest.approx(1 / found.factor)
    assert back.is_loss == found.is_beyond_noise


def test_one_round_tells_no_noise_and_rounds_without_a_figure_are_left_out() -> None:
    found = gain_in_turns([100.0, None, 100.0], [110.0, 110.0, None])
    assert found is not None
    assert (found.rounds, found.ci95, found.is_beyond_noise, found.is_loss) == (1, None, False, False)
    assert gain_in_turns([None], [1.0]) is None
    with pytest.raises(ValueError, match="shorter"):
        gain_in_turns([1.0, 2.0], [1.0])


def test_the_interval_holds_the_truth_nineteen_times_in_twenty() -> None:
    dice, held = random.Random(1), 0
    for _ in range(1000):
        machine = [dice.lognormvariate(0, 0.2) for _ in range(5)]
        before = [100 * each * dice.lognormvariate(0, 0.02) for each in machine]
        after = [110 * each * dice.lognormvariate(0, 0.02) for each in machine]
        found = gain_in_turns(before, after)
        assert found is not None
        assert found.ci95 is not None
        held += found.ci95[0] <= 1.1 <= found.ci95[1]
    assert 930 <= held <= 970
