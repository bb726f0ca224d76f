import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wellfed import SampleRng, TrainData
from wellfed.contract import FEATURE_MODES
from workloads.restoration.crops import CropData, turned
from workloads.restoration.decoding import Decoded
from workloads.restoration.degradations import Degradation
from workloads.restoration.images import PIXELS_FILE, ImagePixels, StoredImage, read_index, write_images

SIDE = 8


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[ImagePixels, tuple[StoredImage, ...]]:
    """Images of three sizes, the smallest as large as a crop, none of whose crops are equal."""
    rng = np.random.default_rng(0)
    folder = tmp_path_factory.mktemp("stored")
    sizes = ((SIDE, SIDE), (20, 31), (40, 17))
    drawn = [rng.integers(0, 256, (*size, 3), dtype=np.uint8) for size in sizes]
    write_images(folder, [(str(number), "train", Decoded(image, ())) for number, image in enumerate(drawn)])
    images = read_index(folder).images
    return ImagePixels(folder / PIXELS_FILE, images[-1].end), images


def crops_of(stored: tuple[ImagePixels, tuple[StoredImage, ...]], patches: int | None = 50, **given: float) -> CropData:
    degrade = Degradation("denoise", **given)
    return CropData(*stored, patch_size=SIDE, patches_per_image=patches, degrade=degrade)


def places(
    data: CropData, stored: tuple[ImagePixels, tuple[StoredImage, ...]], epoch: int = 0
) -> list[tuple[int, int]]:
    """Upper left corners of all crops, each found in its image by its pixels."""
    pixels, images = stored
    found = []
    for index, crop in enumerate(data.fetch(torch.arange(len(data)), SampleRng(0, epoch))["crop"].numpy()):
        image = pixels.image(images[index // 50])
        windows = np.lib.stride_tricks.sliding_window_view(image, crop.shape)[:, :, 0]
        ((y, x),) = np.argwhere((windows == crop).all(axis=(2, 3, 4)))
        found.append((int(y), int(x)))
    return found


def test_crops_lie_anywhere_in_their_image(stored):
    data = crops_of(stored)
    assert isinstance(data, TrainData)
    assert len(data) == 150
    found = places(data, stored)
    assert set(found[:50]) == {(0, 0)}
    for start, (height, width) in ((50, (20, 31)), (100, (40, 17))):
        down, across = (np.array(found[start : start + 50])[:, each] for each in (0, 1))
        assert down.max() <= height - SIDE
        assert across.max() <= width - SIDE
        assert np.ptp(down) > 0.7 * (height - SIDE)
        assert np.ptp(across) > 0.7 * (width - SIDE)


def test_crops_belong_to_seed_epoch_and_index(stored):
    data, indices = crops_of(stored), torch.tensor([60, 149, 3, 77])
    whole = data.fetch(indices, SampleRng(1, 2, batch=5))["crop"]
    for row, index in enumerate(indices):
        assert torch.equal(data.fetch(index[None], SampleRng(1, 2))["crop"][0], whole[row])
        assert torch.equal(data.__getitem__(int(index), SampleRng(1, 2, batch=9))["crop"], whole[row])
    for seed, epoch in ((1, 3), (2, 2)):
        other = data.fetch(indices, SampleRng(seed, epoch))["crop"]
        assert [torch.equal(one, two) for one, two in zip(whole, other, strict=True)] != [True] * 4


def test_clean_patches_are_the_crops_in_0_to_1(stored):
    data = crops_of(stored)
    batch = data.fetch(torch.arange(60), SampleRng(0, 0))
    clean = data.on_device(batch, SampleRng(0, 0))["clean"]
    crop = batch["crop"].permute(0, 3, 1, 2)
    assert torch.equal((clean * 255).flatten(2).sort().values.round(), crop.flatten(2).sort().values.float())
    assert clean.max() == crop.max() / 255


def test_all_eight_ways_are_taken_and_each_is_a_symmetry():
    image = torch.arange(16).view(1, 1, 4, 4).expand(8, 3, 4, 4)
    made = turned(image, torch.arange(8))
    assert len({tuple(each.flatten().tolist()) for each in made}) == 8
    corners = {tuple(sorted(each[0, [0, 0, -1, -1], [0, -1, 0, -1]].tolist())) for each in made}
    assert corners == {(0, 3, 12, 15)}
    neighbours = {(made[way, 0, 0, 0] - made[way, 0, 0, 1]).abs().item() for way in range(8)}
    assert neighbours == {1, 4}


@given(st.integers(1, 60), st.integers(1, 4), st.integers(0, 2**40))
@settings(max_examples=30, deadline=None)
def test_lines_never_leave_the_image(size: int, repeats: int, seed: int):
    images = [
        StoredImage("a", "train", 0, 9, size + 8, ""),
        StoredImage("b", "train", 27 * (size + 8), size + 8, 8, ""),
    ]
    pixels = ImagePixels(Path("none"), images[1].end)
    data = CropData(pixels, images, patch_size=SIDE, patches_per_image=repeats, degrade=Degradation())
    batch = data.for_features("cache").fetch(torch.arange(len(data)), SampleRng(seed, 0))
    line_BP = batch["line"]
    for rows, image in zip(line_BP.split(repeats), images, strict=True):
        assert rows.min() >= image.offset
        assert rows.max() + 3 * SIDE <= image.end
        first = (rows - image.offset) % (3 * image.width)
        assert (first + 3 * SIDE <= 3 * image.width).all()


def test_crops_can_be_sent_to_another_process(stored):
    for mode in FEATURE_MODES:
        data = crops_of(stored).for_features(mode)
        data.fetch(torch.arange(3), SampleRng(0, 0))
        sent = pickle.dumps(data)
        assert len(sent) < 20_000
        one, two = (each.fetch(torch.arange(9), SampleRng(0, 0)) for each in (data, pickle.loads(sent)))
        assert all(torch.equal(one[name], two[name]) for name in one)
