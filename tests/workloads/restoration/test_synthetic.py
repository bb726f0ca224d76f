import numpy as np

from workloads.restoration.synthetic import dead_leaves


def test_equal_seeds_give_equal_images_and_others_others():
    first, again, other = (dead_leaves(2, 64, seed) for seed in (0, 0, 1))
    assert [image.shape for image in first] == [(64, 64, 3)] * 2
    assert all(image.dtype == np.uint8 for image in first)
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert not np.array_equal(first[0], first[1])
