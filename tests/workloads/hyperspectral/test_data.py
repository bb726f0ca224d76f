from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.io import savemat

from wellfed import ConfigError, DataError, Datasets, SampleRng
from workloads.hyperspectral.data import datasets
from workloads.hyperspectral.model import SpectralPatchCNN

SMALL = {
    "passes": 1,
    "size": 40,
    "num_bands": 16,
    "num_classes": 4,
    "num_components": 6,
    "patch_size": 5,
    "block_size": 8,
}


@pytest.fixture
def cache(tmp_path: Path) -> str:
    return str(tmp_path / "cache")


def labels_of(data: Datasets) -> list[np.ndarray]:
    return [split.label_N.numpy() for split in (data.train, data.val, data.test)]


def test_the_embedded_scene_is_split_into_parts_that_share_no_pixel(cache):
    data = datasets(**SMALL, cache_dir=cache)
    train, val, test = (split.place_N[split.label_N >= 0] for split in (data.train, data.val, data.test))
    assert len(torch.cat([train, val, test]).unique()) == len(train) + len(val) + len(test)
    assert len(data.test) == 40 * 40
    assert all(set(np.unique(labels[labels >= 0])) == {0, 1, 2, 3} for labels in labels_of(data)[::2])
    assert data.model_args == {"num_channels": 6, "num_classes": 4}
    assert "40 x 40 pixels, 16 bands" in data.notes[0]
    assert "6 components hold" in data.notes[0]
    assert any("beside training pixels are left out" in note for note in data.notes)


def test_the_scene_is_prepared_once(cache):
    datasets(**SMALL, cache_dir=cache)
    datasets(**SMALL | {"num_components": 0, "split": "random"}, cache_dir=cache)
    assert len([path for path in Path(cache, "scenes").iterdir() if path.is_dir()]) == 1


def test_components_are_fitted_on_training_pixels_alone(cache, put, cube, labels):
    """Whatever the other pixels hold."""
    path, given = put(), {"cache_dir": cache, "num_components": 2, "patch_size": 1, "passes": 1, "split": "random"}
    before = datasets(str(path), **given)
    columns, where = 10, before.train.place_N
    other = np.full_like(cube, 1e4)
    other.reshape(-1, 6)[where] = cube.reshape(-1, 6)[where]
    assert columns * 12 > len(where) > 20
    np.save(path, other)
    after = datasets(str(path), **given)
    assert torch.equal(after.train.place_N, where)
    batches = [data.train.fetch(torch.arange(len(where)))["rows"] for data in (before, after)]
    assert torch.allclose(*batches)


def test_background_may_have_any_label(cache, put, cube, labels):
    data = datasets(str(put(cube, labels - 1)), cache_dir=cache, background=-1, patch_size=3, num_components=3)
    assert data.model_args["num_classes"] == 3
    assert data.evaluation.names == ["0", "1", "2"]
    assert (data.evaluation.class_HW[0] == -1).all()


def test_too_little_to_learn_is_refused(cache, put, cube, labels):
    with pytest.raises(DataError, match=r"field_gt\.npy: classes to tell apart .*: none\. workload\.data\.background"):
        datasets(str(put(cube, labels * 0)), cache_dir=cache)
    with pytest.raises(DataError, match=r"with their pixels: 1 \(40\)"):
        datasets(str(put(cube, labels * (labels == 1))), cache_dir=cache)


def test_bad_files_leave_nothing_behind(cache, put, cube):
    cube[3, 4, 5] = np.nan
    with pytest.raises(DataError, match="nan at row 3, column 4, band 5"):
        datasets(str(put(cube)), cache_dir=cache)
    assert not any(path.is_dir() for path in Path(cache, "scenes").glob("*"))


def test_files_of_matlab_are_read(cache, tmp_path, cube, labels):
    savemat(tmp_path / "Scene_corrected.mat", {"scene": cube.astype(np.float64)})
    savemat(tmp_path / "Scene_gt.mat", {"scene_gt": labels.astype(np.uint8)})
    data = datasets(str(tmp_path), cache_dir=cache, patch_size=3, num_components=0)
    assert data.model_args == {"num_channels": 6, "num_classes": 3}


def test_all_faults_are_told_at_once():
    with pytest.raises(ConfigError) as caught:
        datasets(patch_size=4, num_components=-1, passes=0, split="stripes", block_size=1, train_frac=0.0, val_frac=0.9)
    names = [fault.where.rpartition(".")[2] for fault in caught.value.faults]
    assert names == ["patch_size", "num_components", "passes", "split", "block_size", "train_frac", "val_frac"]
    with pytest.raises(ConfigError, match="leave nothing to test on"):
        datasets(train_frac=0.8, val_frac=0.3)


def test_the_network_learns_what_grows_there(cache):
    """In a few dozen steps: twice as many pixels are right as by naming the most frequent class."""
    torch.manual_seed(0)
    data = datasets(**SMALL | {"split": "random", "train_frac": 0.4}, cache_dir=cache, whole_map=False)
    model = SpectralPatchCNN(**data.model_args, base_channels=16, num_blocks=1, spectral_filters=2, dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    store = data.features.store()

    class Held:
        def rows(self, indices: torch.Tensor) -> torch.Tensor:
            return data.features.cut(store, indices)

    train, test = (split.for_features("cache") for split in (data.train, data.test))
    for step in range(45):
        rng = SampleRng(0, step)
        indices = torch.randint(len(train), (48,), generator=rng)
        loss = model.loss(train.on_device(train.fetch(indices), rng, Held())).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    for indices in torch.arange(len(test)).split(200):
        data.evaluation.update(model, test.on_device(test.fetch(indices), SampleRng(0, 0), Held()))
    most_frequent = np.bincount(data.test.label_N).max() / len(data.test)
    assert data.evaluation.compute()["overall_accuracy"] > min(0.75, 2 * most_frequent)
