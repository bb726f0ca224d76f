"""Derives sample rate, clip length, mel bands and passes per epoch from N recordings, each with its reason."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wellfed.units import counted, show_count
from workloads.speech.clip_files import Ints
from workloads.speech.log_mel import FRAME_S, LOWEST_HZ, mel

FASTEST_HZ = 48_000
"""Maximum derived sample rate, above the range of human hearing."""
COVERED_PCT = 98
"""Percentage of the clips that the chosen length holds whole."""
SHORTEST_S, LONGEST_S = 4 * FRAME_S, 5.0
"""Bounds of the chosen length in seconds."""
USUAL_MELS, FEWEST_MELS = 40, 8
NARROWEST_MEL = 1127 / 700 / FRAME_S / 2
"""Distance of two bands on the mel scale, below which the lowest bands hold no frequency of a frame."""
EPOCH_CLIPS = 1500
"""Minimum number of clips per epoch; 40 epochs then have about 1,900 steps of 32."""

Chosen = tuple[Any, str]


def chosen_rate(rate_N: Ints) -> Chosen:
    """Returns the rate of most clips; the lower rate wins a tie."""
    total, counts = len(rate_N), Counter(rate_N.tolist())
    rate, count = min(counts.items(), key=lambda each: (-each[1], each[0]))
    if rate > FASTEST_HZ:
        return (
            FASTEST_HZ,
            f"most clips have {show_count(rate)}, and no ear hears what lies above {FASTEST_HZ // 2:,} Hz",
        )
    if count == total:
        return rate, f"all {show_count(total)} clips have it"
    return rate, f"{show_count(count)} of {show_count(total)} clips have it; the others are resampled"


def chosen_seconds(seconds_N: NDArray[np.float64]) -> Chosen:
    """Returns a length that holds `COVERED_PCT` of the clips whole, in tenths of a second if they differ."""
    shortest, longest = float(seconds_N.min()), float(seconds_N.max())
    if longest - shortest < 0.001 and SHORTEST_S <= longest <= LONGEST_S:
        return round(longest, 3), f"all {show_count(len(seconds_N))} clips are as long"
    covering = math.ceil(round(10 * float(np.percentile(seconds_N, COVERED_PCT, method="higher")), 3)) / 10
    if covering > LONGEST_S:
        return LONGEST_S, f"the most that is chosen; {COVERED_PCT} % of the clips have up to {covering:g} s"
    if covering < SHORTEST_S:
        return SHORTEST_S, f"four frames; {COVERED_PCT} % of the clips have up to {covering:g} s"
    return covering, f"{COVERED_PCT} % of the clips are no longer; the longest has {longest:.2f} s"


def chosen_mels(sample_rate: int) -> Chosen:
    """Returns the usual number of bands, or the maximum with a frequency in each."""
    most = math.floor((mel(sample_rate / 2) - mel(LOWEST_HZ)) / NARROWEST_MEL) - 1
    if most >= USUAL_MELS:
        return USUAL_MELS, f"the usual number, up to {sample_rate // 2:,} Hz, half the sample rate"
    found = max(FEWEST_MELS, most)
    return found, f"more would be narrower than the frequencies of a frame, up to {sample_rate // 2:,} Hz"


def chosen_passes(num_clips: int) -> Chosen:
    """Returns the passes over the training clips per epoch."""
    passes = max(1, math.ceil(EPOCH_CLIPS / num_clips - 0.5))
    clips = counted(num_clips, "training clip")
    if passes == 1:
        return 1, f"{clips} fill an epoch"
    return passes, f"with {clips} an epoch has {show_count(passes * num_clips)}, each changed in another way"
