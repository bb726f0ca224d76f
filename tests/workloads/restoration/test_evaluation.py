import csv
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.nn import functional

from workloads.restoration.evaluation import ImageQuality, psnr_of, ssim_map
from workloads.restoration.model import RestorationCNN

HALO, CORE = 16, 24
SIZES = [(24, 24), (37, 50), (9, 26)]
Batch = dict[str, torch.Tensor]


def pair(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Clean uint8 and degraded float [3, H, W]."""
    draw = torch.Generator().manual_seed(number)
    small = torch.rand(1, 3, 5, 5, generator=draw)
    clean = (functional.interpolate(small, SIZES[number], mode="bicubic").clamp(0, 1)[0] * 255).byte()
    return clean, clean / 255 + 0.1 * torch.randn(clean.shape, generator=draw)


def mirrored(image: torch.Tensor, top: int, left: int, *, size: tuple[int, int], margin: int) -> torch.Tensor:
    """What begins there, of that size, with a margin all around; outside the image lies its mirror image."""
    places = []
    for start, count, limit in zip((top, left), size, image.shape[1:], strict=True):
        place = torch.arange(start - margin, start + count + margin) % (2 * limit - 2)
        places.append(torch.minimum(place, 2 * limit - 2 - place))
    return image[:, places[0][:, None], places[1]]


def tiles(*, size: int = 3) -> list[Batch]:
    """Of all images, in batches of so many."""
    rows = []
    for number, (height, width) in enumerate(SIZES):
        clean, degraded = pair(number)
        for top in range(0, height, CORE):
            for left in range(0, width, CORE):
                bottom, right = (HALO + min(CORE, each) for each in (height - top, width - left))
                cut = [mirrored(each, top, left, size=(CORE, CORE), margin=HALO) for each in (clean, degraded)]
                rows.append((*cut, number, (HALO, bottom, HALO, right)))
    batches = []
    for start in range(0, len(rows), size):
        clean, degraded, image, valid = zip(*rows[start : start + size], strict=True)
        columns = torch.stack(clean), torch.stack(degraded), torch.tensor(image), torch.tensor(valid)
        batches.append(dict(zip(("clean", "degraded", "image", "valid"), columns, strict=True)))
    return batches


def quality(model: nn.Module, batches: list[Batch]) -> ImageQuality:
    found = ImageQuality([f"image_{number}" for number in range(5)], HALO)
    for batch in batches:
        found.update(model, batch, "features of the crops, which tiles don't need")
    return found


@pytest.fixture
def model() -> RestorationCNN:
    torch.manual_seed(0)
    made = RestorationCNN(base_channels=8, num_blocks=1).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.03 * torch.randn(parameter.shape))
    assert made.reach + 5 <= HALO
    return made


def test_psnr_is_as_worked_out_by_hand():
    """An error of 51/255 = 1/5 everywhere: 10 log10(25) decibels."""
    (batch,) = tiles(size=99)
    flat = batch | {"clean": torch.full_like(batch["clean"], 51), "degraded": torch.full_like(batch["degraded"], 0.4)}
    figures = quality(nn.Identity(), [flat]).compute()
    assert figures["psnr"] == pytest.approx(10 * math.log10(25), abs=1e-4)
    assert figures["psnr_degraded"] == figures["psnr"]
    means, floor = (0.4, 0.2), 0.01**2
    likeness = (2 * means[0] * means[1] + floor) / (means[0] ** 2 + means[1] ** 2 + floor)
    assert figures["ssim"] == pytest.approx(likeness, abs=1e-5)


def test_ssim_is_as_worked_out_by_hand():
    """A single window: weighted means, variances and covariance of 11 x 11 pixels."""
    draw = np.random.default_rng(0)
    one, other = draw.random((2, 11, 11))
    place = np.arange(-5, 6)
    window = np.exp(-(place[:, None] ** 2 + place**2) / (2 * 1.5**2))
    window /= window.sum()
    mean_1, mean_2 = (window * one).sum(), (window * other).sum()
    variance_1, variance_2 = (window * (one - mean_1) ** 2).sum(), (window * (other - mean_2) ** 2).sum()
    covariance = (window * (one - mean_1) * (other - mean_2)).sum()
    expected = (2 * mean_1 * mean_2 + 1e-4) * (2 * covariance + 9e-4)
    expected /= (mean_1**2 + mean_2**2 + 1e-4) * (variance_1 + variance_2 + 9e-4)
    found = ssim_map(*(torch.tensor(each).float()[None, None] for each in (one, other)))
    assert found.shape == (1, 1, 1, 1)
    assert found.item() == pytest.approx(expected, abs=1e-5)
    same = torch.rand(1, 3, 14, 12)
    assert torch.allclose(ssim_map(same, same), torch.ones(1, 3, 4, 2))


def test_tiles_give_the_figures_of_whole_images(model: RestorationCNN):
    found = quality(model, tiles()).per_image()
    assert len(found) == len(SIZES)
    for number, size in enumerate(SIZES):
        clean, degraded = pair(number)
        with torch.no_grad():
            whole = model(mirrored(degraded, 0, 0, size=size, margin=HALO)[None]).clamp(0, 1)
        restored = whole[..., HALO - 5 : 5 - HALO, HALO - 5 : 5 - HALO]
        wanted = mirrored(clean / 255, 0, 0, size=size, margin=5)[None]
        error = (restored - wanted)[..., 5:-5, 5:-5].square().mean().item()
        noise = (degraded.clamp(0, 1) - clean / 255).square().mean().item()
        assert found[f"image_{number}"] == pytest.approx(
            {
                "psnr": psnr_of(error),
                "ssim": ssim_map(restored, wanted).mean().item(),
                "psnr_degraded": psnr_of(noise),
            },
            rel=1e-5,
        )


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_that_share_the_batches_have_the_figures_of_one(model: RestorationCNN, num_ranks: int, tmp_path: Path):
    batches = tiles(size=2)
    alone = quality(model, batches)
    ranks = [quality(model, batches[number::num_ranks]) for number in range(num_ranks)]
    states = [rank.state() for rank in ranks]
    wanted = {name: path.read_bytes() for name, path in alone.artifacts(tmp_path).items()}
    for rank in ranks:
        rank.merge(states)
        assert rank.compute() == pytest.approx(alone.compute(), rel=1e-9)
        assert {
            name: path.read_bytes() for name, path in rank.artifacts(tmp_path).items() if path.suffix == ".png"
        } == {name: content for name, content in wanted.items() if name.startswith("restored")}


def test_a_row_an_image_and_pictures_are_left(model: RestorationCNN, tmp_path: Path):
    found = quality(model, tiles(size=1))
    files = found.artifacts(tmp_path)
    with files["per_image"].open() as file:
        rows = {row.pop("image"): row for row in csv.DictReader(file)}
    assert {name: {key: float(value) for key, value in row.items()} for name, row in rows.items()} == found.per_image()
    pictures = sorted(name for name in files if name.startswith("restored"))
    assert pictures == ["restored_0", "restored_1", "restored_2"]
    first = np.asarray(Image.open(files["restored_0"]))
    clean, degraded = pair(0)
    assert first.shape == (24, 3 * 24, 3)
    assert np.array_equal(first[:, 48:], clean.permute(1, 2, 0).numpy())
    assert np.abs(first[:, :24] - (degraded.clamp(0, 1) * 255).permute(1, 2, 0).numpy()).max() <= 1
