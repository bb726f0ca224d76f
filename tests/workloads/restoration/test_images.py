import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from workloads.restoration.bad_files import BadFiles
from workloads.restoration.decoding import DamagedImage, Decoded
from workloads.restoration.image_files import ImageFile
from workloads.restoration.images import (
    PIXELS_FILE,
    ImagePixels,
    cut_rows,
    decode_into,
    read_index,
    write_images,
)

SIZES = ((40, 50), (33, 64), (64, 32))


@pytest.fixture
def drawn() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, (*size, 3), dtype=np.uint8) for size in SIZES]


@pytest.fixture
def folder(tmp_path: Path, drawn: list[np.ndarray]) -> Path:
    members = [(f"{number}.png", "train", Decoded(image, ("grey",))) for number, image in enumerate(drawn)]
    write_images(tmp_path, [*members[:1], ("bad.png", "train", DamagedImage("torn")), *members[1:]])
    return tmp_path


def pixels_of(folder: Path) -> ImagePixels:
    return ImagePixels(folder / PIXELS_FILE, read_index(folder).images[-1].end)


def test_what_is_written_is_read(folder: Path, drawn: list[np.ndarray]):
    index, pixels = read_index(folder), pixels_of(folder)
    assert [image.name for image in index.images] == ["0.png", "1.png", "2.png"]
    assert (index.damaged, index.turned) == ((("bad.png", "torn"),), (("grey", 3),))
    for source in (pixels, pixels.in_memory()):
        for image, expected in zip(index.images, drawn, strict=True):
            assert np.array_equal(source.image(image), expected)


def test_rows_overlap_and_equal_the_bytes(folder: Path):
    flat = pixels_of(folder).flat
    start_R = torch.tensor([0, 1, 5, len(flat) - 9])
    rows = cut_rows(flat, start_R, 9)
    assert [row.tolist() for row in rows] == [flat[start : start + 9].tolist() for start in start_R.tolist()]


def test_files_are_decoded_in_their_order(tmp_path: Path, drawn: list[np.ndarray]):
    files = []
    for number in range(30):
        path = tmp_path / f"{number}.png"
        Image.fromarray(drawn[number % 3]).save(path)
        files.append(ImageFile(path.name, path, "train"))
    torn = tmp_path / "torn.png"
    torn.write_bytes(files[0].path.read_bytes()[:200])
    files.insert(7, ImageFile(torn.name, torn, "train"))
    kept = tmp_path / "kept"
    kept.mkdir()
    decode_into(kept, files, BadFiles(tmp_path, 1))
    index, pixels = read_index(kept), pixels_of(kept)
    assert [image.name for image in index.images] == [f"{number}.png" for number in range(30)]
    assert [name for name, _ in index.damaged] == ["torn.png"]
    assert all(np.array_equal(pixels.image(image), drawn[at % 3]) for at, image in enumerate(index.images))


def test_bytes_are_not_pickled(folder: Path):
    for pixels in (pixels_of(folder), pixels_of(folder).in_memory()):
        total = int(pixels.flat.long().sum())
        sent = pickle.dumps(pixels)
        assert len(sent) < 1000
        assert int(pickle.loads(sent).flat.long().sum()) == total
