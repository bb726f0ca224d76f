"""Workers of an evaluation, beside the batches that are ready for training."""

import dataclasses

import pytest

from tests.plan.test_decide import FETCH, ITEMS, planned
from tests.plan.test_ready_batches import facts, given, sized

EVALUATED = dataclasses.replace(ITEMS, num_eval=10_000)


def plan(free_mib, *, data=EVALUATED, mib=10.0, backend="processes", micro=None):
    """4 workers x 2 batches x 10 MiB for training = 80 MiB."""
    asked = given(backend, 4, 2, memory={"micro_batch": micro})
    return planned(asked, facts(free_mib / 1024), data=data, trial=sized(mib))


@pytest.mark.parametrize(
    ("free_mib", "num_workers"),
    [
        (300, 4),  # 220 left: 80 are within 0.8 of it
        (185, 4),  # 105 left
        (160, 3),  # 80 left: 4 would fill it
        (110, 1),  # 30 left
        (101, 0),  # 21 left: two batches of one worker are 20
    ],
)
def test_an_evaluation_has_as_many_as_fit_beside_training(free_mib, num_workers):
    found = plan(free_mib)
    assert (found.loader.num_workers, found.loader.eval_workers) == (4, num_workers)
    told = [text for text in found.warnings if "an evaluation has" in text]
    if num_workers == 4:
        assert told == []
    else:
        assert told == [
            f"loader.num_workers=4: an evaluation has {num_workers or 'none'} of them, since /dev/shm has no room for "
            "more beside the batches kept ready for training (80.0 MiB)."
        ]


def test_what_an_evaluation_needs_is_counted_by_its_own_batches():
    assert plan(110, micro=16).loader.eval_workers == 4  # of 64 samples: 2.5 MiB each
    assert plan(101, micro=16).loader.eval_workers == 3
    assert plan(101, data=dataclasses.replace(EVALUATED, num_eval=100)).loader.eval_workers == 0
    assert (
        plan(105, data=dataclasses.replace(EVALUATED, num_eval=64)).loader.eval_workers == 4
    )  # all of it is one batch


def test_without_an_evaluation_or_workers_or_a_look_nothing_is_limited():
    assert plan(101, data=ITEMS).loader.eval_workers == 4
    assert planned(given("processes", 4, 2), facts(0.1), data=EVALUATED).loader.eval_workers == 4
    assert planned(given("inline", 0), facts(0.1), data=dataclasses.replace(FETCH, num_eval=9)).loader.eval_workers == 0
