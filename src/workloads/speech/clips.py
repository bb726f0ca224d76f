"""Builds batches of clips for training and evaluation: audio, log-mel spectrograms, or indices alone.

Shapes: B samples, L samples of audio, M mel bands, T frames, N clips of all splits.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from wellfed import FeatureModeName, Features, FeatureSource, SampleRng, prepared
from workloads.speech.clip_files import Ints
from workloads.speech.log_mel import LogMel
from workloads.speech.waveforms import Waveforms

KIND = "log_mel"
VERSION = 2
"""Version of the spectrograms; raise it if their computation changes."""
CHUNK = 64
"""Number of clips that a thread takes at a time."""


class LogMelTable:
    """Spectrograms of all clips, stored under ``paths.cache_dir``, or computed from the audio.

    Args:
        row_N: numbers of the clips' recordings.
        sources: files with the recordings; ``settings`` is everything else that affects the spectrograms.
    """

    def __init__(
        self,
        waveforms: Waveforms,
        log_mel: LogMel,
        row_N: Ints,
        *,
        sources: Sequence[Path],
        settings: dict[str, Any],
        cache_dir: str | Path,
    ) -> None:
        self.waveforms, self.log_mel, self.row_N = waveforms, log_mel, row_N
        self._sources, self._cache_dir = tuple(sources), str(cache_dir)
        self._settings = settings | {"version": VERSION}

    @property
    def shape(self) -> tuple[int, int, int]:
        """Sizes N, M, T."""
        return len(self.row_N), self.log_mel.num_mels, self.log_mel.num_frames

    def audio(self, clips: Tensor) -> Tensor:
        """Reads audio, int16 [B, L]."""
        return self.waveforms.read(self.row_N[clips.numpy()])

    def made(self, clips: Tensor) -> Tensor:
        """Reads audio and computes spectrograms, float32 [B, M, T]."""
        return self.log_mel(self.audio(clips))

    @cached_property
    def sounds(self) -> Tensor | None:
        """First frame and end of each clip's sound, int64 [N, 2]; None if all frames hold sound."""
        found_N2 = self.log_mel.frames_between(self.waveforms.spans(self.row_N))
        is_full_N = (found_N2[:, 0] == 0) & (found_N2[:, 1] == self.log_mel.num_frames)
        return None if is_full_N.all() else found_N2

    @cached_property
    def mapped(self) -> Tensor:
        """Spectrograms float32 [N, M, T] in a mapped file, created at first use."""
        folder = prepared(self._cache_dir, KIND, self._sources, self._settings, self._write)
        # Copy-on-write, since torch needs a writable tensor; unmodified pages stay shared with the file.
        return torch.from_numpy(np.memmap(folder / "log_mel.bin", dtype=np.float32, mode="c", shape=self.shape))

    @cached_property
    def held(self) -> Tensor:
        """Copy of the spectrograms in RAM."""
        return self.mapped.clone()

    def features(self) -> Features:
        """Returns the features: row i is the spectrogram of clip i, [M, T]."""
        return Features(
            num_rows=len(self.row_N),
            bytes=4 * int(np.prod(self.shape)),
            rows=lambda clips: self.made(clips.cpu()),
            store=lambda: self.mapped,
            cut=_select,
        )

    def _write(self, folder: Path) -> None:
        num_threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        count = len(self.row_N)
        chunks = [torch.arange(first, min(first + CHUNK, count)) for first in range(0, count, CHUNK)]
        with (folder / "log_mel.bin").open("wb") as file, ThreadPoolExecutor(min(8, num_threads), "log-mel") as pool:
            for first in range(0, len(chunks), 4 * num_threads):
                for made in pool.map(self.made, chunks[first : first + 4 * num_threads]):
                    file.write(made.contiguous().numpy().data)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("mapped", "held")}


def _select(store: Tensor, indices: Tensor) -> Tensor:
    return store.index_select(0, indices)


@dataclass(frozen=True)
class Masking:
    """Augmentation of a spectrogram in training, drawn for each epoch."""

    shift_frac: float = 0.1
    """Maximum shift of a clip in time, as a share of its length."""
    time_frac: float = 0.15
    """Maximum length of a blanked stretch, as a share of all frames."""
    mel_frac: float = 0.15
    """Maximum width of a blanked band, as a share of all bands."""

    def __call__(
        self, log_mel_BMT: Tensor, clip_B: Tensor, rng: SampleRng, sound_B2: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Augments spectrograms; blanked and shifted-in frames and bands get the mean of the band over the sound.

        All draws are functions of (seed, epoch, clip). After SpecAugment (Park et al. 2019,
        https://arxiv.org/abs/1904.08779).

        Args:
            clip_B: numbers that determine the draws.
            sound_B2: first frame and end of the sound, which shift too; None = all frames.
        """
        num_mels, num_frames = log_mel_BMT.shape[1:]
        frame_T = torch.arange(num_frames, device=log_mel_BMT.device)
        if sound_B2 is None:
            moved_B2, mean_BM1 = None, log_mel_BMT.mean(2, keepdim=True)
            most = round(self.shift_frac * num_frames)
            shift_B = rng.randint_at(clip_B, 2 * most + 1, draw=0) - most
            frame_BT = frame_T - shift_B[:, None]
            is_blank_BT = (frame_BT < 0) | (frame_BT >= num_frames)
            is_blank_BT |= _stretch(clip_B, num_frames, self.time_frac, rng, draw=1)
        else:  # silence is shifted in and out; shifts and masks depend on the length of the sound
            first_B, end_B = sound_B2.unbind(1)
            length_B = end_B - first_B
            most_B = (self.shift_frac * length_B).round().long()
            shift_B = rng.randint_at(clip_B, 2 * most_B + 1, draw=0) - most_B
            blank_B = rng.randint_at(clip_B, (self.time_frac * length_B).long() + 1, draw=1)
            start_B = first_B + shift_B + rng.randint_at(clip_B, length_B + 1 - blank_B, draw=2)
            is_blank_BT = (frame_T >= start_B[:, None]) & (frame_T < (start_B + blank_B)[:, None])
            is_sound_B1T = sounding_frames(sound_B2, num_frames)[:, None]
            mean_BM1 = (log_mel_BMT * is_sound_B1T).sum(2, keepdim=True) / length_B[:, None, None]
            moved_first_B = (first_B + shift_B).clamp(0, num_frames - 1)
            moved_B2 = torch.stack([moved_first_B, (end_B + shift_B).clamp(1, num_frames)], 1)
        is_blank_BM = _stretch(clip_B, num_mels, self.mel_frac, rng, draw=3)
        frame_BMT = (frame_T - shift_B[:, None]).clamp(0, num_frames - 1)[:, None].expand(-1, num_mels, -1)
        moved_BMT = log_mel_BMT.gather(2, frame_BMT)
        return torch.where(is_blank_BT[:, None] | is_blank_BM[..., None], mean_BM1, moved_BMT), moved_B2


def sounding_frames(sound_B2: Tensor, num_frames: int) -> Tensor:
    """Returns whether each frame lies between the first frame and the end of the sound, bool [B, T]."""
    frame_T = torch.arange(num_frames, device=sound_B2.device)
    return (frame_T >= sound_B2[:, :1]) & (frame_T < sound_B2[:, 1:])


def _stretch(clip_B: Tensor, size: int, most_frac: float, rng: SampleRng, *, draw: int) -> Tensor:
    """Returns True for a stretch of 0 to ``most_frac * size`` positions out of ``size``, [B, size]."""
    length_B = rng.randint_at(clip_B, int(most_frac * size) + 1, draw)
    start_B = rng.randint_at(clip_B, size + 1 - length_B, draw + 1)
    place_S = torch.arange(size, device=clip_B.device)
    return (place_S >= start_B[:, None]) & (place_S < (start_B + length_B)[:, None])


class ClipData:
    """Clips of one split.

    Args:
        clip_S: numbers of the clips in the table; ``label_S`` has their classes.
        masking: augmentation; None = none.
        split: number of the split, for evaluations.
        passes: draws of each clip per epoch.
    """

    def __init__(
        self,
        table: LogMelTable,
        clip_S: Tensor,
        label_S: Tensor,
        *,
        split: int,
        masking: Masking | None = None,
        passes: int = 1,
    ) -> None:
        self.table, self.clip_S, self.label_S, self.split, self.masking = table, clip_S, label_S, split, masking
        self.passes = passes
        self._mode: FeatureModeName = "dynamic"

    def __len__(self) -> int:
        return self.passes * len(self.clip_S)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Returns one sample, equal to a row of `fetch`."""
        batch = self.fetch(torch.tensor([range(len(self))[index]]))
        return {name: values.squeeze(0) for name, values in batch.items()}

    def fetch(self, indices: Tensor, rng: SampleRng | None = None) -> dict[str, Tensor]:
        """Returns ``clip``, ``label`` and ``split``, int64 [B]. Mode ``dynamic`` adds ``audio`` int16 [B, L],
        ``cache_host`` adds ``log_mel`` float32 [B, M, T]. Padded clips add ``sound`` int64 [B, 2] (first frame and
        end). Several passes add ``drawn`` int64 [B], which differs each time. ``rng`` is unused."""
        place_B = indices % len(self.clip_S)
        clip_B = self.clip_S.index_select(0, place_B)
        batch = {
            "clip": clip_B,
            "label": self.label_S.index_select(0, place_B),
            "split": torch.full_like(clip_B, self.split),
        }
        if self.passes > 1:
            batch["drawn"] = clip_B + indices // len(self.clip_S) * len(self.table.row_N)
        if self.table.sounds is not None:
            batch["sound"] = self.table.sounds.index_select(0, clip_B)
        if self._mode == "dynamic":
            batch["audio"] = self.table.audio(clip_B)
        elif self._mode == "cache_host":
            batch["log_mel"] = self.table.held.index_select(0, clip_B)
        return batch

    def on_device(
        self, batch: dict[str, Tensor], rng: SampleRng, features: FeatureSource | None = None
    ) -> dict[str, Tensor]:
        """Returns ``log_mel`` float32 [B, M, T] instead of ``audio``, augmented in training, and ``is_sound`` bool [B,
        T] instead of ``sound``."""
        log_mel_BMT = batch.get("log_mel")
        if log_mel_BMT is None:
            if "audio" in batch:
                log_mel_BMT = self.table.log_mel(batch["audio"])
            elif features is None:
                raise ValueError("A batch of mode cache holds no audio: on_device wants the features.")
            else:
                log_mel_BMT = features.rows(batch["clip"])
        sound_B2 = batch.get("sound")
        if self.masking is not None:
            log_mel_BMT, sound_B2 = self.masking(log_mel_BMT, batch.get("drawn", batch["clip"]), rng, sound_B2)
        rest = {name: values for name, values in batch.items() if name not in ("audio", "sound", "drawn")}
        if sound_B2 is not None:
            rest["is_sound"] = sounding_frames(sound_B2, log_mel_BMT.shape[2])
        return rest | {"log_mel": log_mel_BMT}

    def for_features(self, mode: FeatureModeName) -> Self:
        """Returns the same samples, with batches for that mode."""
        other = copy.copy(self)
        other._mode = mode
        if mode == "cache_host":
            assert len(self.table.held)  # created now, so that forked processes share it
        return other
