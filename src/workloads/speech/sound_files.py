"""Decodes sound files of all formats that soundfile reads; only this module imports soundfile."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wellfed import DataError
from workloads.speech.wav_layout import DamagedClip

Sound = NDArray[np.float32]
_UNKNOWN_LENGTH = 2**62
"""Sample count from libsndfile if the true count is unknown, e.g. for flac written to a pipe."""
_MOST_SAMPLES = 8192
"""Maximum samples of a channel that a byte holds: FLAC has up to 65,535 equal ones in 11 bytes."""
_USUAL_SAMPLES = 64
"""Samples of a channel per byte that speech does not exceed, except for silence: Opus at 6 kbit/s has 64."""


def decode(content: bytes) -> tuple[Sound, int]:
    """Decodes samples ``[frames, channels]`` in -1..1, and the sample rate.

    Raises:
        DamagedClip: decoding fails, or there are no samples.
        DataError: soundfile is missing.
    """
    soundfile, stated = _soundfile(), 0
    try:
        with soundfile.SoundFile(io.BytesIO(content)) as file:
            stated, rate = file.frames, file.samplerate
            if stated >= _UNKNOWN_LENGTH:
                raise DamagedClip("its header does not say how long it is; encode it again, into a file")
            if stated > _MOST_SAMPLES * len(content):
                raise DamagedClip(f"its header claims {stated} samples, which {len(content)} bytes can't hold")
            sound = file.read(dtype="float32", always_2d=True)
    except (soundfile.SoundFileError, ValueError, TypeError) as error:
        raise DamagedClip(f"it can't be decoded ({str(error).rstrip('.')})") from error
    except MemoryError as error:
        if stated <= _USUAL_SAMPLES * len(content):
            raise
        claim = f"its header claims {stated} samples, unlikely in {len(content)} bytes"
        raise DamagedClip(f"{claim}, and memory does not suffice for them") from error
    if not len(sound):
        raise DamagedClip("it holds no samples")
    if len(sound) < stated:
        raise DamagedClip(f"cut off: {len(sound)} of {stated} samples can be decoded")
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
