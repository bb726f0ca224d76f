from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from workloads.restoration.decoding import DamagedImage, decode, size_of

HEIGHT, WIDTH = 24, 32
RAMP = np.arange(HEIGHT * WIDTH).reshape(HEIGHT, WIDTH)


def colours() -> np.ndarray:
    return np.stack([RAMP % 256, RAMP // 3 % 256, 255 - RAMP % 256], axis=2).astype(np.uint8)


def saved(path: Path, image: Image.Image, **options: object) -> Path:
    image.save(path, **options)
    return path


def test_colours_are_as_they_were(tmp_path: Path):
    for suffix in ("png", "bmp", "tif"):
        decoded = decode(saved(tmp_path / f"a.{suffix}", Image.fromarray(colours())))
        assert np.array_equal(decoded.pixels, colours())
        assert decoded.turned == ()
    decoded = decode(saved(tmp_path / "a.JPG", Image.fromarray(colours()[:, ::-1] // 2 + 60), quality=100))
    assert np.abs(decoded.pixels.astype(int) - (colours()[:, ::-1] // 2 + 60)).mean() < 16
    assert size_of(tmp_path / "a.JPG") == HEIGHT * WIDTH


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_what_is_transparent_is_white(tmp_path: Path, mode: str):
    rgba = np.dstack([colours(), np.full((HEIGHT, WIDTH), 255, np.uint8)])
    rgba[:5, :, 3] = 0
    image = Image.fromarray(rgba).convert(mode) if mode != "P" else Image.fromarray(rgba).quantize(16)
    decoded = decode(saved(tmp_path / "a.png", image))
    assert decoded.pixels.shape == (HEIGHT, WIDTH, 3)
    assert (decoded.pixels[:5] == 255).all()
    assert decoded.turned == ("alpha laid over white",)
    if mode == "RGBA":
        assert np.array_equal(decoded.pixels[5:], colours()[5:])


@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_upright(tmp_path: Path, orientation: int):
    """Each of the eight orientations of EXIF, as a camera writes them; only the first is upright by itself."""
    turns = {
        1: lambda x: x,
        2: lambda x: x[:, ::-1],
        3: lambda x: x[::-1, ::-1],
        4: lambda x: x[::-1],
        5: lambda x: x.transpose(1, 0, 2),
        6: lambda x: x.transpose(1, 0, 2)[::-1],
        7: lambda x: x[::-1, ::-1].transpose(1, 0, 2),
        8: lambda x: x.transpose(1, 0, 2)[:, ::-1],
    }
    exif = Image.Exif()
    exif[0x0112] = orientation
    lying = np.ascontiguousarray(turns[orientation](colours()))
    decoded = decode(saved(tmp_path / "a.png", Image.fromarray(lying), exif=exif))
    assert np.array_equal(decoded.pixels, colours())
    assert decoded.turned == (() if orientation == 1 else ("turned by EXIF",))


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "bmp", "tif"])
def test_files_that_are_cut_short_are_damaged(tmp_path: Path, suffix: str):
    path = saved(
        tmp_path / f"a.{suffix}", Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8))
    )
    whole = path.read_bytes()
    for share in (0.02, 0.5, 0.9):
        path.write_bytes(whole[: int(share * len(whole))])
        with pytest.raises(DamagedImage):
            decode(path)


@pytest.mark.parametrize(
    "content", [b"", b"x", b"<html>404 not found</html>", b"\x89PNG\r\n\x1a\n", b"%!PS-Adobe-3.0 EPSF"]
)
def test_what_is_no_image_is_damaged(tmp_path: Path, content: bytes):
    path = tmp_path / "a.png"
    path.write_bytes(content)
    with pytest.raises(DamagedImage):
        decode(path)
    with pytest.raises(DamagedImage):
        size_of(path)
