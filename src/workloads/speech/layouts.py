"""Examines each of N recordings once: its content, the position of its samples, and whether it is usable.

The results are cached under ``paths.cache_dir``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from wellfed import prepared
from workloads.speech import sound_files
from workloads.speech.clip_files import ClipReader, FoundClips, Ints
from workloads.speech.wav_layout import DamagedClip, wav_layout

KIND = "speech_clips"
VERSION = 2
"""Version of the examination."""
SLOWEST_HZ, FASTEST_HZ = 1000, 768_000
"""Range of valid sample rates; others mean a damaged header."""


@dataclass(frozen=True)
class Layouts:
    """Properties of the recordings, [N] each."""

    offset: Ints
    """First byte of the samples; -1 = soundfile must decode them."""
    frames: Ints
    """Number of samples per channel; 0 = damaged."""
    rate: Ints
    channels: Ints
    damages: dict[int, str]
    """Reason for each damaged recording."""

    @property
    def is_plain(self) -> NDArray[np.bool_]:
        """Whether the recording's bytes are plain 16-bit samples."""
        return self.offset >= 0


def examined_layouts(found: FoundClips, cache_dir: str | Path) -> Layouts:
    """Returns the layouts of all recordings, from the cache if possible.

    Raises:
        DataError: a file can't be read, or soundfile is needed and missing.
    """
    settings = {"version": VERSION, "which": found.which}
    build = partial(_write, found.reader, len(found.names))
    folder = prepared(cache_dir, KIND, found.sources, settings, build)
    damages = json.loads((folder / "damages.json").read_text(encoding="utf-8"))
    offset, frames, rate, channels = np.load(folder / "layouts.npy")
    return Layouts(offset, frames, rate, channels, {int(row): reason for row, reason in damages.items()})


def _write(reader: ClipReader, count: int, folder: Path) -> None:
    columns, damages = np.zeros((4, count), np.int64), dict[int, str]()
    for row in range(count):
        try:
            columns[:, row] = _layout(reader, row)
        except DamagedClip as error:
            damages[row] = str(error)
    np.save(folder / "layouts.npy", columns)
    (folder / "damages.json").write_text(json.dumps(damages), encoding="utf-8")


def _layout(reader: ClipReader, row: int) -> tuple[int, int, int, int]:
    offset, frames, rate, channels = _told(reader, row)
    if not SLOWEST_HZ <= rate <= FASTEST_HZ:
        raise DamagedClip(f"its header says {rate:,} samples a second, which is not in {SLOWEST_HZ:,}..{FASTEST_HZ:,}")
    return offset, frames, rate, channels


def _told(reader: ClipReader, row: int) -> tuple[int, int, int, int]:
    size = reader.size(row)

    def read(start: int, count: int) -> bytes:
        count = min(count, size - start)
        return content(reader, row, start, count) if count > 0 else b""

    if read(0, 4) in (b"fLaC", b"OggS"):
        layout = None
    else:
        layout = wav_layout(read, size)
        if layout.is_pcm16:
            frames = layout.num_bytes // (2 * layout.num_channels)
            return layout.offset, frames, layout.sample_rate, layout.num_channels
    sound, rate = sound_files.decode(content(reader, row, 0, size))
    return -1, len(sound), rate, sound.shape[1]


def content(reader: ClipReader, row: int, start: int, count: int) -> bytes:
    """Returns bytes of one recording."""
    into = np.empty(count, np.uint8)
    reader.fill(np.array([row]), [into], np.array([start]))
    return into.tobytes()
