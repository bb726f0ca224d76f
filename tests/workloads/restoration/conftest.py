"""Folders of small images."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """A folder of their own, empty."""
    folder = tmp_path / "photos"
    folder.mkdir()
    return folder


@pytest.fixture
def put(photos: Path) -> Callable[..., Path]:
    """Puts an image of noise into the folder: its name, and width and height."""
    rng = np.random.default_rng(0)

    def write(name: str, width: int = 32, height: int = 24, **options: int) -> Path:
        path = photos / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(path, **options)
        return path

    return write
