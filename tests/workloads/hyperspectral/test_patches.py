from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from wellfed import Features, SampleRng, TrainData
from wellfed.contract import FEATURE_MODES
from workloads.hyperspectral.bands import fit_components, fit_scaling
from workloads.hyperspectral.padded_cube import read_cube, write_scene
from workloads.hyperspectral.patches import PatchData, PatchStore, mirrored, patch_features
from workloads.hyperspectral.scene_files import RawScene

SIDE = 5


class Held:
    """Patches cut out of the store, as the engine does."""

    def __init__(self, features: Features) -> None:
        self._features, self._store = features, features.store()

    def rows(self, indices: Tensor) -> Tensor:
        return self._features.cut(self._store, indices)


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., tuple[PatchData, Features]]:
    """Patches around 40 pixels of a scene of 16 x 13 pixels and 12 bands."""
    values = np.random.default_rng(0).integers(0, 4000, (16, 13, 12)).astype(np.uint16)
    write_scene(tmp_path, RawScene(values, np.zeros((16, 13), np.int32)), SIDE // 2, "a")
    cube, _, _ = read_cube(tmp_path)

    def make(num_components: int | None = 4, is_mirrored: bool = True) -> tuple[PatchData, Features]:
        drawn = torch.Generator().manual_seed(0)
        row, column = (torch.randint(0, most, (40,), generator=drawn) for most in (16, 13))
        spectra = cube.pixels(row, column)
        components = None if num_components is None else fit_components(spectra, num_components)
        store = PatchStore(cube, components)
        scaling = fit_scaling(spectra) if num_components is None else None
        place, label = cube.place_of(row, column), torch.arange(40) % 3
        return PatchData(store, place, label, scaling=scaling, is_mirrored=is_mirrored), patch_features(store)

    return make


def patches(data: PatchData, features: Features | None, indices: Tensor, epoch: int = 0) -> dict[str, Tensor]:
    return data.on_device(data.fetch(indices), SampleRng(3, epoch), None if features is None else Held(features))


@pytest.mark.parametrize("num_components", [None, 4])
def test_every_mode_gives_the_same_patches(made, num_components: int | None):
    data, features = made(num_components)
    assert isinstance(data, TrainData)
    indices = torch.arange(0, 40, 3)
    as_built = patches(data, None, indices)
    assert as_built["patch"].shape == (14, num_components or 12, SIDE, SIDE)
    assert as_built["patch"].dtype == torch.float32
    assert as_built["patch"].abs().max() < 20
    for mode in FEATURE_MODES:
        chosen = data.for_features("cache").for_features(mode)
        assert ("rows" in chosen.fetch(indices)) == (mode != "cache")
        found = patches(chosen, features, indices)
        assert torch.allclose(found["patch"], as_built["patch"], atol=1e-5, rtol=0)
        assert torch.equal(found["label"], indices % 3)


def test_mirrors_belong_to_seed_epoch_and_index(made):
    data, _ = made()
    plain, _ = made(is_mirrored=False)
    whole = patches(data, None, torch.arange(40))["patch"]
    part = data.on_device(data.fetch(torch.arange(20, 25)), SampleRng(3, 0, batch=9, part=2))["patch"]
    assert torch.equal(part, whole[20:25])
    assert not torch.equal(patches(data, None, torch.arange(40), epoch=1)["patch"], whole)
    straight = patches(plain, None, torch.arange(40))["patch"]
    ways = [mirrored(straight, torch.full((40,), way)) for way in range(8)]
    seen = {next(way for way in range(8) if torch.equal(ways[way][row], whole[row])) for row in range(40)}
    assert len(seen) == 8
    middle = SIDE // 2
    assert torch.equal(whole[..., middle, middle], straight[..., middle, middle])
