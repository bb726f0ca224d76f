import pickle

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from workloads.restoration.decoding import Decoded
from workloads.restoration.degradations import Degradation
from workloads.restoration.images import PIXELS_FILE, ImagePixels, StoredImage, read_index, write_images
from workloads.restoration.tiles import TileData

SIZES = ((40, 50), (33, 17), (16, 48))


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[ImagePixels, tuple[StoredImage, ...]]:
    rng = np.random.default_rng(0)
    folder = tmp_path_factory.mktemp("stored")
    drawn = [rng.integers(0, 256, (*size, 3), dtype=np.uint8) for size in SIZES]
    write_images(folder, [(str(number), "test", Decoded(image, ())) for number, image in enumerate(drawn)])
    images = read_index(folder).images
    return ImagePixels(folder / PIXELS_FILE, images[-1].end), images


def tiles_of(stored: tuple[ImagePixels, tuple[StoredImage, ...]], core: int | None = 16, halo: int = 6) -> TileData:
    return TileData(*stored, degrade=Degradation().for_evaluation, core=core, halo=halo)


def put_together(data: TileData, values: torch.Tensor, number: int) -> torch.Tensor:
    """An image of the cores of its tiles [N, C, T, T]."""
    height, width = SIZES[number]
    batch = data.fetch(torch.arange(len(data)))
    whole = torch.full((values.shape[1], height, width), float("nan"))
    for row, (image, y, x) in enumerate(data.place_N3.tolist()):
        if image == number:
            y0, y1, x0, x1 = batch["valid"][row].tolist()
            assert torch.isnan(whole[:, y : y + y1 - y0, x : x + x1 - x0]).all()
            whole[:, y : y + y1 - y0, x : x + x1 - x0] = values[row, :, y0:y1, x0:x1]
    return whole


def test_cores_are_the_whole_image_once(stored):
    data, (pixels, images) = tiles_of(stored), stored
    batch = data.fetch(torch.arange(len(data)))
    assert len(data) == 3 * 4 + 3 * 2 + 1 * 3
    assert batch["clean"].shape == batch["degraded"].shape == (len(data), 3, 28, 28)
    degradation = Degradation()
    for number, image in enumerate(images):
        clean = torch.from_numpy(pixels.image(image).copy()).permute(2, 0, 1)
        assert torch.equal(put_together(data, batch["clean"].float(), number), clean.float())
        degraded = degradation.for_evaluation(clean, int(image.digest[:12], 16))
        assert torch.equal(put_together(data, batch["degraded"], number), degraded)


def test_tiled_equals_whole_where_the_halo_is_as_wide_as_the_reach(stored):
    """Three convolutions reach three pixels; with a halo of two the seams show."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)]
    model, degradation, (pixels, images) = nn.Sequential(*layers), Degradation(), stored
    apart = {}
    for halo in (3, 2):
        data = tiles_of(stored, halo=halo)
        with torch.no_grad():
            restored = model(data.fetch(torch.arange(len(data)))["degraded"])
        for number, image in enumerate(images):
            clean = torch.from_numpy(pixels.image(image).copy()).permute(2, 0, 1)
            degraded = degradation.for_evaluation(clean, int(image.digest[:12], 16))
            with torch.no_grad():
                whole = model(functional.pad(degraded[None], (3, 3, 3, 3), mode="reflect"))[0, :, 3:-3, 3:-3]
            apart[halo, number] = float((put_together(data, restored, number) - whole).abs().max())
    assert max(apart[3, number] for number in range(3)) < 1e-5
    assert min(apart[2, number] for number in range(3)) > 1e-3


def test_batches_are_cut_anywhere(stored):
    """And a tile is the same whichever came before it, in another process too."""
    data = tiles_of(stored)
    whole = data.fetch(torch.arange(len(data)))
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))
    sent = pickle.loads(pickle.dumps(data))
    for rows in order.split(4):
        for each in (data.fetch(rows), sent.fetch(rows)):
            assert all(torch.equal(each[name], whole[name][rows]) for name in whole)
    assert torch.equal(data[5]["valid"], whole["valid"][5])
    with pytest.raises(IndexError):
        data[21]
