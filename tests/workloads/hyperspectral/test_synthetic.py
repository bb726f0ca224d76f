import numpy as np
import pytest

from wellfed import ConfigError
from workloads.hyperspectral.synthetic import field_scene


def test_a_scene_has_fields_of_all_classes():
    cube, labels = field_scene(48, 20, 6, 3)
    assert cube.shape == (48, 48, 20)
    assert cube.dtype == np.uint16
    assert set(np.unique(labels)) == {0, 1, 2, 3, 4, 5, 6}
    assert 0.5 < (labels > 0).mean() < 0.95
    again, other = field_scene(48, 20, 6, 3), field_scene(48, 20, 6, 4)
    assert (cube == again[0]).all()
    assert (labels != other[1]).any()


def test_sizes_out_of_range_are_refused():
    with pytest.raises(
        ConfigError, match=r"3 faults.*\n.*workload\.data\.size: 5 .*\n.*num_bands: 2 .*\n.*num_classes"
    ):
        field_scene(5, 2, 1, 0)
