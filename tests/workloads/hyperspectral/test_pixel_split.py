import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_np

from workloads.hyperspectral.pixel_split import NONE, TEST, TRAIN, VAL, keep_apart, split_blocks, split_random
from workloads.hyperspectral.synthetic import field_scene

SHARES = (0.3, 0.1, 0.6)


@pytest.fixture(scope="module")
def fields() -> np.ndarray:
    """Classes of the embedded scene, -1 for background."""
    return field_scene(96, 8, 9, 0)[1].astype(np.int64) - 1


def shares_of(classes: np.ndarray, parts: np.ndarray) -> np.ndarray:
    """Of each class in train, val and test."""
    held = [[((classes == each) & (parts == part)).sum() for part in (TRAIN, VAL, TEST)] for each in range(9)]
    return np.array(held) / np.array(held).sum(1, keepdims=True)


@settings(max_examples=40, deadline=None)
@given(
    st_np.arrays(np.int64, st.tuples(st.integers(1, 12), st.integers(1, 12)), elements=st.integers(-1, 3)),
    st.sampled_from(["blocks", "random"]),
    st.integers(2, 9),
)
def test_each_class_of_two_pixels_is_trained_on_and_tested_on(classes: np.ndarray, split: str, block_size: int):
    counts = [(classes == each).sum() for each in range(4)]
    kept = [each for each in range(4) if counts[each] > 1]
    classes = np.select([classes == each for each in kept], range(len(kept)), -1) if kept else classes * 0 - 1
    if not kept:
        return
    rng = np.random.default_rng(0)
    parts = split_random(classes, SHARES, rng) if split == "random" else split_blocks(classes, SHARES, block_size, rng)
    assert ((parts == NONE) == (classes < 0)).all()
    for each in range(len(kept)):
        assert ((classes == each) & (parts == TRAIN)).any()
        assert ((classes == each) & (parts == TEST)).any()


def test_blocks_give_each_class_its_shares(fields):
    parts = split_blocks(fields, SHARES, 16, np.random.default_rng(0))
    assert np.abs(shares_of(fields, parts) - SHARES).max() < 0.2
    assert np.abs(shares_of(fields, parts) - SHARES).mean() < 0.06
    again = split_blocks(fields, SHARES, 16, np.random.default_rng(0))
    other = split_blocks(fields, SHARES, 16, np.random.default_rng(1))
    assert (parts == again).all()
    assert (parts != other).any()


def test_random_pixels_have_exact_shares(fields):
    parts = split_random(fields, SHARES, np.random.default_rng(0))
    assert np.abs(shares_of(fields, parts) - SHARES).max() < 0.01


@pytest.mark.parametrize("radius", [1, 4])
def test_no_test_pixel_lies_in_a_training_patch(fields, radius: int):
    before = split_blocks(fields, SHARES, 16, np.random.default_rng(0))
    parts, num_left_out, too_close = keep_apart(fields, before, radius)
    assert too_close[TEST] == []
    assert num_left_out == ((before != NONE) & (parts == NONE)).sum() > 0
    assert ((before == TRAIN) == (parts == TRAIN)).all()
    held_back = np.isin(fields, too_close[VAL])
    for row, column in np.argwhere(parts == TRAIN):
        around = (slice(max(0, each - radius), each + radius + 1) for each in (row, column))
        around = tuple(around)
        assert not (parts[around] == TEST).any()
        assert not ((parts[around] == VAL) & ~held_back[around]).any()
