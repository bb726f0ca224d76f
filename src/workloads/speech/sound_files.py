"""Decodes sound files of any format that soundfile reads; the only module that imports it."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wellfed import DataError
from workloads.speech.wav_layout import DamagedClip

Sound = NDArray[np.float32]
_NOT_TOLD = 2**62
"""Number of samples that libsndfile gives if it is unknown, as in flac that was written into a pipe."""


def decode(content: bytes) -> tuple[Sound, int]:
    """Decodes samples ``[frames, channels]`` in -1..1, and the sample rate.

    Raises:
        DamagedClip: it can't be decoded, or holds none.
        DataError: soundfile is missing.
    """
    soundfile = _soundfile()
    try:
        with soundfile.SoundFile(io.BytesIO(content)) as file:
            told, rate = file.frames, file.samplerate
            if told >= _NOT_TOLD:
                raise DamagedClip("its header does not say how long it is; encode it again, into a file")
            sound = file.read(dtype="float32", always_2d=True)
    except (soundfile.SoundFileError, ValueError, TypeError, MemoryError) as error:  # MemoryError: a damaged length
        raise DamagedClip(f"it can't be decoded ({str(error).rstrip('.')})") from error
    if not len(sound):
        raise DamagedClip("it holds no samples")
    if len(sound) < told:
        raise DamagedClip(f"cut off: {len(sound)} of {told} samples can be decoded")
    if not np.isfinite(sound).all():
        raise DamagedClip("some of its samples are no numbers")
    return sound, rate


def _soundfile() -> Any:
    try:
        import soundfile  # type: ignore[import-untyped]
    except (ImportError, OSError) as error:  # OSError: its C library is missing
        raise DataError(
            f"Sound files other than 16-bit wav need the package soundfile, which can't be imported ({error}). "
            "Install it: python -m pip install 'wellfed[audio]'."
        ) from error
    return soundfile
