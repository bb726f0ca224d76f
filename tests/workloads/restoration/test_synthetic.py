import numpy as np
import pytest

from wellfed import ConfigError
from workloads.restoration.synthetic import GROUP, dead_leaves


def test_equal_seeds_give_equal_images_and_others_others():
    first, again, other = (dead_leaves(2, 64, seed) for seed in (0, 0, 1))
    assert [image.shape for image in first] == [(64, 64, 3)] * 2
    assert all(image.dtype == np.uint8 for image in first)
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert not np.array_equal(first[0], first[1])


def test_more_images_than_a_group_are_all_different():
    images = dead_leaves(GROUP + 2, 32, 0)
    assert len({image.tobytes() for image in images}) == GROUP + 2


def test_they_are_as_photographs_are():
    """Neighbours are alike, edges are sharp, brightness is wide, colour is narrow, nothing is blown out."""
    images = np.stack(dead_leaves(8, 128, 0)).astype(np.float64)
    step = np.abs(np.diff(images.mean(-1), axis=1))
    assert 2 < step.mean() < 20
    assert np.median(step) < 0.5 * step.mean()
    assert np.percentile(step, 99) > 40
    assert 25 < images.mean(-1).std() < 75
    assert (images - images.mean(-1, keepdims=True)).std() < 0.6 * images.mean(-1).std()
    assert np.mean((images == 0) | (images == 255)) < 0.1


@pytest.mark.parametrize(("num_images", "size", "name"), [(0, 64, "num_images"), (1, 8, "size")])
def test_impossible_sizes_are_refused(num_images: int, size: int, name: str):
    with pytest.raises(ConfigError, match=name):
        dead_leaves(num_images, size, 0)
