"""Wav files and shards for the tests of speech."""

import io
import tarfile
import wave
from collections.abc import Iterable
from pathlib import Path

import numpy as np


def tone(hz: float = 440.0, seconds: float = 1.0, rate: int = 16_000, volume: float = 0.5) -> np.ndarray:
    """Int16 [L]."""
    return (np.sin(2 * np.pi * hz * np.arange(round(seconds * rate)) / rate) * volume * 32767).astype(np.int16)


def wav(sound: np.ndarray, rate: int = 16_000, channels: int = 1) -> bytes:
    """The bytes of a file of 16 bits."""
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(np.asarray(sound, "<i2").tobytes())
    return out.getvalue()


def folder(place: Path, *, classes: Iterable[str] = ("no", "yes"), speakers: int = 8, of_each: int = 2) -> Path:
    """Two tones as words; speakers as in Speech Commands."""
    for number, name in enumerate(classes):
        (place / name).mkdir(parents=True, exist_ok=True)
        for speaker in range(speakers):
            for clip in range(of_each):
                sound = tone(300 * (number + 1) + 10 * speaker + clip)
                (place / name / f"s{speaker}_nohash_{clip}.wav").write_bytes(wav(sound))
    return place


def shard(place: Path, members: Iterable[tuple[str, bytes]]) -> Path:
    """A tar file."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(place, "w") as file:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            file.addfile(member, io.BytesIO(content))
    return place


def voices(place: Path, seconds: float = 1.2, rate: int = 8000, clips: int = 12) -> Path:
    """Two classes of recordings that are of one rate and differ in length."""
    for number, name in enumerate(("no", "yes")):
        (place / name).mkdir(parents=True)
        for clip in range(clips):
            sound = tone(300 * (number + 1) + 7 * clip, seconds - 0.05 * clip, rate)
            (place / name / f"{clip}.wav").write_bytes(wav(sound, rate))
    return place
