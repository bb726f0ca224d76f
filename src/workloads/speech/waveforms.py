"""Reads recordings as audio of one rate and one length.

Shapes: B clips, L samples of a clip.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wellfed import DataError
from workloads.speech import sound_files
from workloads.speech.clip_files import ClipReader, Ints
from workloads.speech.layouts import Layouts, content
from workloads.speech.resampling import resample
from workloads.speech.wav_layout import DamagedClip


class Waveforms:
    """Audio of recordings: one channel, ``sample_rate``, ``num_samples``, 16 bits.

    Longer recordings are cut, shorter ones padded with silence, equally at both ends. A recording in the wanted format
    is read directly into the batch; others are mixed down and resampled first.
    """

    def __init__(self, reader: ClipReader, layouts: Layouts, sample_rate: int, num_samples: int) -> None:
        self.reader, self.layouts, self.sample_rate, self.num_samples = reader, layouts, sample_rate, num_samples
        self._is_direct_N = layouts.is_plain & (layouts.rate == sample_rate) & (layouts.channels == 1)
        spare_N = layouts.frames - num_samples
        self._start_N = layouts.offset + np.maximum(spare_N, 0) // 2 * 2
        """First byte of each recording that is read directly."""
        self._is_whole_N = self._is_direct_N & (spare_N >= 0)

    def spans(self, rows: Ints) -> Tensor:
        """Returns first sample and end of the recordings in their clips, int64 [B, 2]."""
        length_B = -(-self.layouts.frames[rows] * self.sample_rate // self.layouts.rate[rows])
        length_B = np.minimum(length_B, self.num_samples)
        before_B = (self.num_samples - length_B) // 2
        return torch.from_numpy(np.stack([before_B, before_B + length_B], 1))

    def read(self, rows: Ints) -> Tensor:
        """Reads int16 [B, L].

        Raises:
            DataError: a file has changed since it was examined.
        """
        is_whole_B = self._is_whole_N[rows]
        if is_whole_B.all():
            audio_BL = np.empty((len(rows), self.num_samples), np.int16)
            self.reader.fill(rows, audio_BL.view(np.uint8), self._start_N[rows])
            return torch.from_numpy(audio_BL)
        audio_BL = np.zeros((len(rows), self.num_samples), np.int16)
        is_direct_B = self._is_direct_N[rows]
        for place in np.flatnonzero(~is_direct_B).tolist():
            self._put(audio_BL[place], self._converted(int(rows[place])))
        targets, direct = list[NDArray[np.uint8]](), np.flatnonzero(is_direct_B)
        for place in direct.tolist():
            frames = min(int(self.layouts.frames[rows[place]]), self.num_samples)
            before = (self.num_samples - frames) // 2
            targets.append(audio_BL[place, before : before + frames].view(np.uint8))
        self.reader.fill(rows[direct], targets, self._start_N[rows[direct]])
        return torch.from_numpy(audio_BL)

    def _put(self, into_L: NDArray[np.int16], sound: Tensor) -> None:
        spare = len(sound) - self.num_samples
        if spare >= 0:
            sound = sound[spare // 2 : spare // 2 + self.num_samples]
        before = max(0, -spare) // 2
        into_L[before : before + len(sound)] = (sound * 2**15).round().clamp(-(2**15), 2**15 - 1).to(torch.int16)

    def _converted(self, row: int) -> Tensor:
        """Returns float32 samples in -1..1, mono, at the wanted rate."""
        layouts = self.layouts
        channels, rate = int(layouts.channels[row]), int(layouts.rate[row])
        if layouts.offset[row] >= 0:
            num_bytes = 2 * channels * int(layouts.frames[row])
            raw = content(self.reader, row, int(layouts.offset[row]), num_bytes)
            sound = np.frombuffer(raw, "<i2").reshape(-1, channels).astype(np.float32) / np.float32(2**15)
        else:
            try:
                sound, _ = sound_files.decode(content(self.reader, row, 0, self.reader.size(row)))
            except DamagedClip as error:
                raise DataError(f"{self.reader.place(row)}: {error}. Start again: it has changed.") from error
        mono = torch.from_numpy(sound.mean(1, dtype=np.float32))
        return resample(mono[None], rate, self.sample_rate)[0]
