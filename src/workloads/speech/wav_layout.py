"""Finds the samples of a wav file from its header alone.

Format: https://www.mmsp.ece.mcgill.ca/Documents/AudioFormats/WAVE/WAVE.html
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

from wellfed.units import counted

_HEAD = 256
"""Number of bytes read first; most headers have 44."""
_MOST_CHUNKS = 64
_PCM, _EXTENSIBLE = 1, 0xFFFE
_UNKNOWN_SIZE = 0x7FFFF000
"""Smallest placeholder for an unknown size, besides 0, from programs that write to a pipe. The samples then reach the
end of the file. This value is sox's; ffmpeg's is 0xFFFFFFFF."""


class DamagedClip(Exception):
    """Raised for an unusable recording; the text is the reason."""


@dataclass(frozen=True)
class WavLayout:
    """Format and position of the samples of a file."""

    offset: int
    """First byte of the samples."""
    num_bytes: int
    sample_rate: int
    num_channels: int
    is_pcm16: bool


def wav_layout(read: Callable[[int, int], bytes], size: int) -> WavLayout:
    """Returns the layout of a file of ``size`` bytes; ``read(start, count)`` returns its bytes.

    Raises:
        DamagedClip: the file is no wav, has no samples, or fewer than in its header.
    """
    head = read(0, min(_HEAD, size))
    if head[:4] not in (b"RIFF", b"RIFX", b"RF64") or head[8:12] != b"WAVE":
        raise DamagedClip(f"no wav file: it begins with {head[:4]!r}" if head else "empty")
    if head[:4] != b"RIFF":
        raise DamagedClip(f"a wav file of the kind {head[:4].decode()}, which is not read; save it as RIFF")
    at, form = 12, None
    for _ in range(_MOST_CHUNKS):
        chunk = _bytes(read, head, at, 8)
        if len(chunk) < 8:
            break
        kind, length = chunk[:4], int.from_bytes(chunk[4:], "little")
        at += 8
        if kind == b"fmt ":
            form = _bytes(read, head, at, min(length, 40))
        elif kind == b"data":
            return _with_samples(form, at, length, size)
        at += length + length % 2
    raise DamagedClip("its header is cut off or damaged: no samples are named in it")


def _bytes(read: Callable[[int, int], bytes], head: bytes, at: int, count: int) -> bytes:
    return head[at : at + count] if at + count <= len(head) else read(at, count)


def _with_samples(form: bytes | None, at: int, stated: int, size: int) -> WavLayout:
    if form is None or len(form) < 16:
        raise DamagedClip("its header does not say what its samples are")
    kind, num_channels, sample_rate, _, block, bits = struct.unpack_from("<HHIIHH", form)
    if kind == _EXTENSIBLE and len(form) >= 26:
        kind = int.from_bytes(form[24:26], "little")
    if not (num_channels and sample_rate and block):
        raise DamagedClip(f"its header says {counted(num_channels, 'channel')} at {sample_rate} Hz")
    num_bytes = stated if 0 < stated < _UNKNOWN_SIZE else size - at
    if num_bytes > size - at:
        raise DamagedClip(f"cut off: {max(0, size - at):,} of {num_bytes:,} bytes of samples are there")
    is_pcm16 = kind == _PCM and bits == 16 and block == 2 * num_channels
    if num_bytes < block:
        raise DamagedClip("it holds no samples")
    return WavLayout(at, num_bytes - num_bytes % block, sample_rate, num_channels, is_pcm16)
