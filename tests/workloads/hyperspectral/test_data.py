import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.io import savemat
from torchmetrics.classification import MulticlassAccuracy

from wellfed import ConfigError, DataError, Datasets, SampleRng
from wellfed.batches import Delivery
from wellfed.config.compose import compose
from wellfed.run.planner import plan_without_running
from wellfed.train.plain_model.evaluating import Evaluating
from wellfed.train.plain_model.split_metrics import SplitMetrics
from wellfed.train.step.micro_batches import Preparation
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


def test_the_map_may_be_of_test_pixels_alone(cache):
    data = datasets(**SMALL, cache_dir=cache, whole_map=False)
    assert (data.test.label_N >= 0).all()
    assert datasets(**SMALL | {"val_frac": 0.0}, cache_dir=cache).val is None


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


def test_a_class_of_one_pixel_is_left_out_and_told(cache, put, cube, labels):
    labels[5, 6] = 9
    data = datasets(str(put(cube, labels)), cache_dir=cache, patch_size=3, num_components=3)
    assert data.model_args["num_classes"] == 3
    assert any("Class 9 of " in note and "one pixel, at row 5, column 6" in note for note in data.notes)


def test_a_label_below_zero_is_told(cache, put, cube, labels):
    data = datasets(str(put(cube, labels - 1)), cache_dir=cache, patch_size=3, num_components=3)
    assert data.evaluation.names == ["-1", "1", "2"]
    assert any("Label -1 of " in note and "10 pixels" in note and "background=-1" in note for note in data.notes)


def test_pixels_that_are_kept_beside_training_pixels_are_told(cache, put):
    data = datasets(str(put()), cache_dir=cache, patch_size=23, num_components=3, block_size=2)
    for part in ("validation", "test"):
        assert any(f"Of classes 1, 2, 3 all {part} pixels lie in patches" in note for note in data.notes)


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


@pytest.mark.parametrize(("bands", "components"), [(1, 1), (3, 3), (13, 13), (40, 15)])
def test_a_scene_of_any_number_of_bands_is_taken(cache, put, cube, labels, bands, components):
    more = np.random.default_rng(0).normal(size=(*labels.shape, bands)) + labels[..., None]
    data = datasets(str(put(more, labels)), cache_dir=cache, patch_size=3, split="random", train_frac=0.5)
    found, because = data.derived["workload.data.num_components"]
    assert found == components == data.model_args["num_channels"]
    assert because.startswith("the usual number" if bands > 15 else "as many as the scene has bands")
    passes, because = data.derived["workload.data.passes"]
    pixels = len(data.train) // passes
    assert 1000 < len(data.train) < 2000
    assert because == f"with {pixels} training pixels an epoch has {len(data.train):,} patches"
    model = SpectralPatchCNN(**data.model_args)
    batch = data.train.on_device(data.train.fetch(torch.tensor([0, pixels])), SampleRng(0, 0))
    assert model.loss(batch).loss.isfinite()
    assert batch["label"][0] == batch["label"][1], "the next pass over the pixels"


def test_what_is_typed_stays(cache, put):
    data = datasets(str(put()), cache_dir=cache, patch_size=3, num_components=2, passes=3)
    assert not data.derived
    assert data.model_args["num_channels"] == 2
    assert len(data.train) == 3 * len(data.train.label_N)
    with pytest.raises(ConfigError, match=r"num_components: 9 components of 6 bands .*null to let the scene decide"):
        datasets(str(put()), cache_dir=cache, patch_size=3, num_components=9)


def test_the_plan_says_what_follows_from_the_scene(cache, put):
    words = ["workload=hyperspectral", f"workload.data.path={put()}", "workload.data.patch_size=3"]
    plan = plan_without_running(compose([*words, f"paths.cache_dir={cache}"])).to_dict()["plan"]
    found = {knob: one["value"] for knob, one in plan.items() if one["source"] == "data"}
    assert found["workload.data.num_components"] == 6
    assert found["workload.data.passes"] > 1


def test_all_faults_are_told_at_once():
    with pytest.raises(ConfigError) as caught:
        datasets(patch_size=4, num_components=-1, passes=0, split="stripes", block_size=1, train_frac=0.0, val_frac=0.9)
    names = [fault.where.rpartition(".")[2] for fault in caught.value.faults]
    assert names == ["patch_size", "num_components", "passes", "split", "block_size", "train_frac", "val_frac"]
    with pytest.raises(ConfigError, match="leave nothing to test on"):
        datasets(train_frac=0.8, val_frac=0.3)


def test_means_count_labelled_pixels_alone(cache):
    """The map of the test has other pixels too, more of them in some batches than in others; some have no others."""
    data = datasets(**SMALL, cache_dir=cache)
    test, targets = data.test, torch.cat([torch.full((64,), -1), data.test.label_N])
    places = torch.cat([test.place_N[:64], test.place_N])
    test.place_N, test.label_N = places, targets
    torch.manual_seed(0)
    model = SpectralPatchCNN(**data.model_args, base_channels=8, num_blocks=1, spectral_filters=2).eval()
    evaluating = Evaluating(
        model,
        SplitMetrics(model, data.evaluation, MulticlassAccuracy(4, average="micro", ignore_index=-1)),
        {"test": Preparation(test, 1)},
        may_halve=False,
        on_event=lambda *_, **__: None,
    )
    evaluating.begin()
    for indices in torch.arange(len(test)).split(64):
        evaluating.take("test", Delivery(test.fetch(indices), 0, 0, len(indices)), None, torch.device("cpu"), 0)
    figures = evaluating.end()
    assert figures["accuracy"] == pytest.approx(figures["MulticlassAccuracy"])
    assert figures["accuracy"] == pytest.approx(figures["overall_accuracy"])


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


MEASURED = """
import re, sys
import numpy as np, torch
from wellfed import SampleRng
from workloads.hyperspectral.data import datasets
torch.set_num_threads(1)
def peak():
    return int(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read()).group(1)) * 1024
def used(path, **size):
    given = {"cache_dir": sys.argv[2], "patch_size": 11, "num_components": eval(sys.argv[3]), "whole_map": False}
    train = datasets(path, **given, **size).train.for_features("cache_host")
    for indices in (torch.arange(2000) % len(train)).split(2):
        train.on_device(train.fetch(indices), SampleRng(0, 0))
used(None, size=32, num_bands=200)  # the libraries' own pages
before = peak()
used(sys.argv[1])
print((peak() - before) / np.load(sys.argv[1], mmap_mode="r").nbytes)
"""


@pytest.mark.slow  # starts processes
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from /proc")
@pytest.mark.parametrize("dtype", ["float32", "uint16"])
@pytest.mark.parametrize("num_components", [0, 30])
def test_a_scene_costs_less_than_twice_its_size(tmp_path: Path, num_components: int, dtype: str):
    """Peak of memory over what the process had before, pages of mapped files included; patches of their own: 121 x."""
    rng = np.random.default_rng(0)
    np.save(tmp_path / "a.npy", rng.normal(2000, 300, size=(145, 145, 200)).astype(dtype))
    np.save(tmp_path / "a_gt.npy", rng.integers(0, 17, (145, 145)))
    command = [sys.executable, "-c", MEASURED, str(tmp_path / "a.npy"), str(tmp_path / "cache"), str(num_components)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    for name in ("builds", "finds"):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True)
        assert float(done.stdout) < 2, name
