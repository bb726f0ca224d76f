"""Small scenes as files."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray


@pytest.fixture
def cube() -> NDArray[np.float32]:
    """12 x 10 pixels of 6 bands, none of whose spectra are equal."""
    return np.random.default_rng(0).normal(size=(12, 10, 6)).astype(np.float32)


@pytest.fixture
def labels() -> NDArray[np.int64]:
    """Background in the first line, classes 1 to 3 in stripes below."""
    found = np.repeat([0, *[1, 2, 3] * 4], 1)[:12, None] * np.ones((1, 10), dtype=np.int64)
    return found.astype(np.int64)


@pytest.fixture
def put(tmp_path: Path, cube: NDArray[np.float32], labels: NDArray[np.int64]) -> Callable[..., Path]:
    """Saves a cube and its ground truth and gives the cube's path; None leaves one out."""

    def write(cube: object = cube, labels: object = labels, name: str = "field") -> Path:
        for content, suffix in ((cube, ""), (labels, "_gt")):
            if content is not None:
                np.save(tmp_path / f"{name}{suffix}.npy", np.asarray(content))
        return tmp_path / f"{name}.npy"

    return write
