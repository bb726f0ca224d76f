"""Decodes image files of any kind into 8-bit RGB pixels."""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Importing the last three registers them; a search for plugins in several threads would fail.
from PIL import BmpImagePlugin, Image, ImageOps, TiffImagePlugin, UnidentifiedImageError, WebPImagePlugin  # noqa: F401

from wellfed import first_line
from wellfed.units import show_count

Pixels = NDArray[np.uint8]
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "TIFF")
"""Formats that Pillow may recognise in any file; none of them runs a program."""
MAX_PIXELS = 150_000_000
"""Maximum number of pixels, above all cameras; a larger image takes more than 450 MB to decode."""
_ORIENTATION = 0x0112
_WITH_ALPHA = ("RGBA", "LA", "PA", "RGBa", "La")


class DamagedImage(Exception):
    """Raised for a file without a usable image; the text is the reason."""


@dataclass(frozen=True)
class Decoded:
    """An image, and its conversions."""

    pixels: Pixels
    """Pixels ``[height, width, 3]``."""
    turned: tuple[str, ...]
    """Original kind of an image that was converted to 8-bit RGB, and omissions: ``grey``, ``CMYK``, ``16 bits``."""


@contextmanager
def quiet_pillow() -> Iterator[None]:
    """Silences Pillow's warnings about odd metadata and large images, which `decode` checks itself. Not thread-safe."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"PIL\.")
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        yield


def size_of(path: Path) -> int:
    """Returns the number of pixels of an image, from its header.

    Raises:
        DamagedImage: there is no image, or it exceeds `MAX_PIXELS`.
    """
    with _opened(path) as image:
        return image.width * image.height


def decode(path: Path) -> Decoded:
    """Decodes the first image of a file, upright as its EXIF orientation says.

    Raises:
        DamagedImage: the image is unreadable, truncated or too large.
    """
    with _opened(path) as image:
        depth = _raw_mode(image)  # before the pixels are loaded, for the EXIF of a PNG
        turned = ["more than one frame"] if getattr(image, "n_frames", 1) > 1 and image.format != "MPO" else []
        if image.getexif().get(_ORIENTATION, 1) != 1:
            turned.append("turned by EXIF")
        image.load()
        ImageOps.exif_transpose(image, in_place=True)
        pixels, kind = _rgb(image)
        turned += [kind] if kind else []
        if ";16" in depth and kind != "16 bits":
            turned.append("16 bits")
        return Decoded(np.ascontiguousarray(pixels), tuple(turned))


class _File(io.BufferedReader):
    """A file that is asked for no more than it has.

    Pillow asks for what a piece claims to hold, up to 2 GiB, and Python makes room for all of that first.
    """

    def __init__(self, path: Path) -> None:
        raw = io.FileIO(path)
        super().__init__(raw)
        self._num_bytes = os.fstat(raw.fileno()).st_size

    def read(self, size: int | None = -1, /) -> bytes:
        """Returns at most ``size`` bytes; -1 or None = all that are left."""
        left = max(0, self._num_bytes - self.tell())
        return super().read(left if size is None or size < 0 else min(size, left))


@contextmanager
def _opened(path: Path) -> Iterator[Image.Image]:
    """Opens the image and reads its header; any error becomes `DamagedImage`."""
    try:
        with _File(path) as file, Image.open(file, formats=FORMATS) as image:
            num_pixels = image.width * image.height
            if num_pixels > MAX_PIXELS:
                raise DamagedImage(_too_large(f"{image.width} x {image.height}"))
            yield image
    except (DamagedImage, MemoryError):
        raise
    except Image.DecompressionBombError as error:
        raise DamagedImage(_too_large("the image's")) from error
    except UnidentifiedImageError as error:
        raise DamagedImage("not an image, or one of another kind") from error
    except Exception as error:  # decoders raise all kinds of errors
        raise DamagedImage(first_line(error)) from error


def _too_large(size: str) -> str:
    return f"{size} pixels are more than {show_count(MAX_PIXELS)}; cut it into pieces"


def _raw_mode(image: Image.Image) -> str:
    """Returns the sample format of the file, such as ``RGB;16B``; Pillow reduces 16-bit colours silently."""
    tiles: Any = getattr(image, "tile", None)
    arguments = tiles[0][3] if tiles else ""
    first = arguments[0] if isinstance(arguments, tuple) and arguments else arguments
    return first if isinstance(first, str) else ""


def _rgb(image: Image.Image) -> tuple[Pixels, str]:
    """Returns pixels ``[height, width, 3]``, and their original kind; empty = RGB."""
    mode = image.mode
    if mode.startswith("I"):
        return _of_16_bits(image), "16 bits"
    if mode == "F":
        raise DamagedImage("its samples are floats, of no range that could be known; save it with 8 bits")
    if mode in _WITH_ALPHA or "transparency" in image.info:
        with_alpha = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        return np.asarray(Image.alpha_composite(white, with_alpha).convert("RGB")), "alpha laid over white"
    kind = {"RGB": "", "L": "grey", "1": "black and white", "P": "palette"}.get(mode, mode)
    return np.asarray(image if mode == "RGB" else image.convert("RGB")), kind


def _of_16_bits(image: Image.Image) -> Pixels:
    """Returns the upper 8 of 16 bits, as grey."""
    values_HW = np.asarray(image).astype(np.int64)
    if values_HW.min() < 0 or values_HW.max() > 0xFFFF:
        raise DamagedImage(f"its samples reach from {values_HW.min()} to {values_HW.max()}; save it with 8 or 16 bits")
    return np.repeat((values_HW >> 8).astype(np.uint8)[..., None], 3, axis=2)
