"""Draws recordings of made-up words by different speakers.

A word is a sequence of sounds. Another word has the same sounds backwards, so that order matters. A sound is a voiced
hum or a hiss, shaped by resonances (formants) that move from sound to sound.

Shapes: B clips, L samples, T frames, F frequencies, S sounds of a word, R resonances.
"""

from __future__ import annotations

import wave
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from wellfed import seed_from

Floats = NDArray[np.float64]
Sound = NDArray[np.float32]
SOUNDS: dict[str, tuple[float, float, float, float, float]] = {
    # three resonances in Hz, loudness of voice, loudness of hiss
    "a": (750, 1250, 2600, 1.0, 0.0),
    "i": (290, 2250, 3000, 0.8, 0.0),
    "u": (320, 800, 2300, 0.8, 0.0),
    "e": (480, 1900, 2550, 0.9, 0.0),
    "n": (260, 1500, 2400, 0.35, 0.0),
    "s": (5200, 6300, 7200, 0.0, 0.5),
    "x": (2300, 3200, 4300, 0.0, 0.5),
    "z": (4600, 5800, 6900, 0.3, 0.35),
}
"""Sounds named after similar vowels and consonants (vowels: Peterson & Barney 1952)."""
WORDS = ("sai", "ias", "nue", "eun", "xau", "uax", "zen", "nez", "usi", "isu")
BANDWIDTHS = (90.0, 130.0, 220.0)
HISS_BANDWIDTH = 700.0
WINDOW, HOP = 512, 256
MEAN_SNR_DB = 10.0


@dataclass(frozen=True)
class Speaker:
    """Properties of a speaker, the same in all words."""

    pitch_hz: float
    tract: float
    """Factor of all resonances; shorter vocal tracts have higher resonances."""
    pace: float
    tilt: float
    """Exponent of the spectrum's slope over frequency."""
    breath: float


def write_wavs(folder: Path, *, num_clips: int, num_speakers: int, sample_rate: int, seed: int) -> None:
    """Writes wav files ``<word>/<speaker>_nohash_<number>.wav`` of a second each, equally many per word."""
    for word in WORDS:
        (folder / word).mkdir(parents=True, exist_ok=True)
    for number, (word, speaker, sound_L) in enumerate(spoken_words(num_clips, num_speakers, sample_rate, seed)):
        with wave.open(str(folder / word / f"{speaker:04d}_nohash_{number}.wav"), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(sample_rate)
            file.writeframes(sound_L.astype("<i2").tobytes())


def spoken_words(
    num_clips: int, num_speakers: int, sample_rate: int, seed: int
) -> Iterator[tuple[str, int, NDArray[np.int16]]]:
    """Yields word, number of the speaker, and a second of sound."""
    speakers = [_speaker(np.random.default_rng(seed_from(seed, 1, number))) for number in range(num_speakers)]
    for number in range(num_clips):
        rng = np.random.default_rng(seed_from(seed, 2, number))
        word, speaker = WORDS[number % len(WORDS)], int(rng.integers(num_speakers))
        yield word, speaker, _recorded(_spoken(word, speakers[speaker], sample_rate, rng), sample_rate, rng)


def _speaker(rng: np.random.Generator) -> Speaker:
    is_high = rng.random() < 0.5
    return Speaker(
        pitch_hz=rng.uniform(165, 260) if is_high else rng.uniform(85, 150),
        tract=rng.uniform(1.0, 1.2) if is_high else rng.uniform(0.85, 1.02),
        pace=rng.uniform(0.8, 1.25),
        tilt=rng.uniform(-1.3, -0.6),
        breath=rng.uniform(0.002, 0.01),
    )


def _spoken(word: str, speaker: Speaker, sample_rate: int, rng: np.random.Generator) -> Sound:
    """Draws the word alone, [L] with its own L."""
    long_S = rng.uniform(0.11, 0.2, len(word)) / speaker.pace
    length = int(long_S.sum() * sample_rate)
    num_frames = -(-length // HOP)
    # Each sound is reached at its middle, with transitions between.
    middle_S = (long_S.cumsum() - long_S / 2) / long_S.sum()
    sounds_S5 = np.array([SOUNDS[sound] for sound in word])
    sounds_S5[:, :3] *= speaker.tract * rng.normal(1, 0.04, (len(word), 3))
    at_T = np.linspace(0, 1, num_frames)
    steep_T = _in_steps(at_T, middle_S)
    track_T5 = np.stack([np.interp(steep_T, np.arange(len(word)), column) for column in sounds_S5.T], 1)
    hiss_L = rng.standard_normal(length, dtype=np.float32)
    voice_L = _hum(speaker, length, sample_rate, rng) + np.float32(speaker.breath) * hiss_L
    voiced_L = _shaped(voice_L, track_T5[:, :3], BANDWIDTHS, speaker.tilt, sample_rate)
    hissed_L = _shaped(hiss_L, track_T5[:, :3], (HISS_BANDWIDTH,) * 3, 0.0, sample_rate)
    loud_TL = [np.interp(np.arange(length) / length, at_T, track_T5[:, column]) for column in (3, 4)]
    ends_L = np.minimum(1, np.minimum(np.arange(length), np.arange(length)[::-1]) / (0.02 * sample_rate))
    said_L = (_even(voiced_L) * loud_TL[0] + _even(hissed_L) * loud_TL[1]) * ends_L
    return np.asarray(said_L, np.float32)


def _in_steps(at_T: Floats, middle_S: Floats) -> Floats:
    """Returns the number of the sound at each time; transitions are steeper than linear."""
    place_T = np.interp(at_T, middle_S, np.arange(len(middle_S)))
    whole_T = np.floor(place_T)
    return np.asarray(whole_T + np.clip((place_T - whole_T - 0.5) * 2.5 + 0.5, 0, 1))


def _hum(speaker: Speaker, length: int, sample_rate: int, rng: np.random.Generator) -> Sound:
    """Returns pulses of the voice, [L], with falling and trembling pitch."""
    time_L = np.arange(length) / sample_rate
    fall = rng.uniform(-0.3, 0.1) * time_L / time_L[-1]
    tremble = 0.015 * np.sin(2 * np.pi * (rng.uniform(4, 7) * time_L + rng.random()))
    phase_L = np.cumsum(speaker.pitch_hz * rng.normal(1, 0.06) * (1 + fall + tremble)) / sample_rate
    return np.asarray(np.diff(np.floor(phase_L), prepend=0.0), np.float32)


def _shaped(
    sound_L: Sound, resonance_TR: Floats, bandwidths: tuple[float, ...], tilt: float, sample_rate: int
) -> Sound:
    """Weights the spectrum of each frame by resonances and a slope, [L]."""
    num_frames = len(resonance_TR)
    padded = np.zeros((num_frames - 1) * HOP + WINDOW, np.float32)
    padded[WINDOW // 2 : WINDOW // 2 + len(sound_L)] = sound_L[: len(padded) - WINDOW // 2]
    window_W = np.sin(np.pi * np.arange(WINDOW) / WINDOW).astype(np.float32)
    frames_TW = np.lib.stride_tricks.sliding_window_view(padded, WINDOW)[::HOP] * window_W
    hz_F = np.fft.rfftfreq(WINDOW, 1 / sample_rate).astype(np.float32)
    gain_TF = np.full((num_frames, len(hz_F)), 0.003, np.float32)
    for resonance_T, bandwidth in zip(resonance_TR.T.astype(np.float32), bandwidths, strict=True):
        gain_TF += 1 / (1 + ((hz_F - resonance_T[:, None]) / bandwidth) ** 2)
    gain_TF *= np.maximum(hz_F / 500, 0.2) ** tilt
    frames_TW = np.fft.irfft(np.fft.rfft(frames_TW) * gain_TF) * window_W
    found = np.zeros_like(padded)
    for start in range(0, WINDOW, HOP):
        # Frames that are WINDOW apart touch without overlap.
        piece = frames_TW[start // HOP :: WINDOW // HOP].reshape(-1)
        found[start : start + len(piece)] += piece
    return found[WINDOW // 2 : WINDOW // 2 + len(sound_L)]


def _even(sound_L: Sound) -> Sound:
    return np.asarray(sound_L / (np.sqrt(np.mean(sound_L**2)) + 1e-9))


def _recorded(word_L: Sound, sample_rate: int, rng: np.random.Generator) -> NDArray[np.int16]:
    """Draws a second around the word, with noise, at a random volume."""
    spare = sample_rate - len(word_L)
    found = np.zeros(sample_rate, np.float32)
    start = int(rng.integers(max(1, spare)))
    found[start : start + len(word_L)] = word_L[:sample_rate]
    spectrum_F = np.fft.rfft(rng.standard_normal(sample_rate, dtype=np.float32))
    spectrum_F *= np.maximum(np.arange(len(spectrum_F), dtype=np.float32), 20) ** np.float32(rng.uniform(-1.0, 0.0))
    noise = np.fft.irfft(spectrum_F, sample_rate).astype(np.float32)
    snr_db = rng.normal(MEAN_SNR_DB, 5)
    found += _even(noise) * np.sqrt(np.mean(word_L**2)) * 10 ** (-snr_db / 20)
    volume = rng.uniform(0.05, 0.9) * 2**15 / np.abs(found).max()
    recorded: NDArray[np.int16] = (found * volume).astype(np.int16)
    return recorded
