"""Builds the data of speech from a folder, tar shards or the embedded words: clips for training and evaluation."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from wellfed import ConfigError, DataError, Datasets, prepared
from wellfed.data.shards import write_shards
from wellfed.data.shards.class_folders import SPLITS
from wellfed.units import counted, show_bytes, show_count
from workloads.speech.clip_files import FoundClips, Ints, find_clips
from workloads.speech.clips import ClipData, LogMelTable, Masking
from workloads.speech.derived import (
    FEWEST_MELS,
    SHORTEST_S,
    Chosen,
    chosen_mels,
    chosen_passes,
    chosen_rate,
    chosen_seconds,
)
from workloads.speech.evaluation import SpokenWords
from workloads.speech.layouts import Layouts, examined_layouts
from workloads.speech.log_mel import LogMel
from workloads.speech.splits import SPEAKER, choose_splits
from workloads.speech.synthetic import write_wavs
from workloads.speech.waveforms import Waveforms

EMBEDDED_HZ = 16_000
EMBEDDED_VERSION = 2
"""Version of the embedded recordings; raise it if their synthesis changes."""
CLIPS_OF_A_SPEAKER = 36
NUM_SHARDS = 4


def datasets(
    path: str | None = None,
    *,
    clip_seconds: float | None = None,
    sample_rate: int | None = None,
    num_mels: int | None = None,
    passes: int | None = None,
    mask: bool = True,
    max_damaged: int = 10,
    val_frac: float = 0.1,
    test_frac: float = 0.1,
    speaker: str = SPEAKER,
    num_clips: int = 2000,
    seed: int = 0,
    cache_dir: str = ".cache",
) -> Datasets:
    """Returns clips of one length, each with its class.

    Args:
        path: folder of classes (``<class>/*.wav``, also flac and ogg), folder of tar shards (webdataset's layout), or a
            tar file. Folders ``train/``, ``val/`` and ``test/`` in it are used as splits. None = the embedded set.
        clip_seconds: length of all clips, which are cut or padded at both ends; None = long enough for 98 % of them.
        sample_rate: sample rate of all clips; None = the rate of most clips.
        num_mels: bands of the spectrogram; None = 40, or fewer for a low sample rate.
        passes: draws of each training clip per epoch; None = about 1,500 clips in all.
        mask: whether to shift clips in time and blank parts of them in training.
        max_damaged: maximum number of undecodable, unlabelled or truncated recordings to skip.
        val_frac: share of the clips for validation, without folders or lists; ``test_frac`` likewise. 0 = none.
        speaker: regular expression that finds the speaker in a name; clips of a speaker stay in one split.
        num_clips: size of the embedded set.
        seed: seed of the split and of the embedded set; the training has its own.
        cache_dir: folder for the index of shards, and for spectrograms.

    Raises:
        DataError: there are no recordings or labels, too many damaged or too few to split; or the cache can't be
            written.
        ConfigError: an argument is out of range.
    """
    has_rate = sample_rate is None or 1000 <= sample_rate <= 192_000
    has_length = not has_rate or clip_seconds is None or SHORTEST_S <= clip_seconds <= 60
    has_mels = num_mels is None or FEWEST_MELS <= num_mels <= 256
    has_passes = passes is None or 1 <= passes <= 10_000
    ConfigError.check(
        "workload.data",
        (
            *("sample_rate", sample_rate, has_rate),
            *("Hz is not in 1,000..192,000", "sample_rate=16000, or null for the clips' own"),
        ),
        (
            *("clip_seconds", clip_seconds, has_length),
            *(f"is not in {SHORTEST_S}..60", "clip_seconds=1.0 or so, or null for a length that holds most clips"),
        ),
        ("num_mels", num_mels, has_mels, f"is not in {FEWEST_MELS}..256", "num_mels=40 or so, or null"),
        ("passes", passes, has_passes, "is not in 1..10,000", "passes=1, or null for what the set's size asks for"),
        ("max_damaged", max_damaged, max_damaged >= 0, "is negative", "0 to allow none"),
        ("val_frac", val_frac, 0 <= val_frac <= 0.45, "is not in 0..0.45", "val_frac=0.1, or 0 for none"),
        ("test_frac", test_frac, 0 <= test_frac <= 0.45, "is not in 0..0.45", "test_frac=0.1, or 0 for none"),
        ("speaker", speaker, not (wrong := _not_one_group(speaker)), wrong, f"speaker='{SPEAKER}' or so"),
        ("num_clips", num_clips, 120 <= num_clips <= 1_000_000, "is not in 120..1,000,000", "num_clips=2000 or so"),
    )
    place = _embedded(num_clips, sample_rate or EMBEDDED_HZ, seed, cache_dir) if path is None else Path(path)
    found = find_clips(place, cache_dir)
    layouts = examined_layouts(found, cache_dir)
    bad = [*found.bad, *(f"{found.reader.place(row)}: {reason}" for row, reason in layouts.damages.items())]
    _refuse_damaged(bad, max_damaged, len(found.names), len(layouts.damages))
    kept = [row for row in range(len(found.names)) if row not in layouts.damages]
    splits, split_notes = choose_splits(
        [found.names[row] for row in kept],
        None if found.splits is None else [found.splits[row] for row in kept],
        speaker=speaker,
        val_frac=val_frac,
        test_frac=test_frac,
        seed=seed,
    )
    number_of = {name: number for number, name in enumerate(found.classes)}
    label_N = torch.tensor([number_of[found.labels[row]] for row in kept])
    _refuse_one_class(place, found, label_N)
    row_N, derived = np.array(kept, np.int64), dict[str, Chosen]()

    def chosen(name: str, typed: Any, found: Chosen) -> Any:
        """Returns the typed value, else the value derived from the clips."""
        if typed is not None:
            return typed
        derived[f"workload.data.{name}"] = found
        return found[0]

    sample_rate = chosen("sample_rate", sample_rate, chosen_rate(layouts.rate[row_N]))
    clip_seconds = chosen("clip_seconds", clip_seconds, chosen_seconds(layouts.frames[row_N] / layouts.rate[row_N]))
    num_mels = chosen("num_mels", num_mels, chosen_mels(sample_rate))
    passes = chosen("passes", passes, chosen_passes(splits.count("train")))
    num_samples = round(clip_seconds * sample_rate)
    settings = {"num_samples": num_samples, "sample_rate": sample_rate, "num_mels": num_mels}
    table = LogMelTable(
        Waveforms(found.reader, layouts, sample_rate, num_samples),
        LogMel(sample_rate, num_samples, num_mels),
        row_N,
        sources=found.sources,
        settings=settings | {"which": found.which},
        cache_dir=cache_dir,
    )
    clips = {split: torch.tensor([at for at, each in enumerate(splits) if each == split]).long() for split in SPLITS}

    def data(split: str) -> ClipData | None:
        masking = Masking() if split == "train" and mask else None
        clip_S = clips[split]
        times = passes if split == "train" else 1
        found = ClipData(table, clip_S, label_N[clip_S], split=SPLITS.index(split), masking=masking, passes=times)
        return found if len(found) else None

    train = data("train")
    assert train is not None
    return Datasets(
        train=train,
        val=data("val"),
        test=data("test"),
        features=table.features(),
        evaluation=SpokenWords(found.classes),
        model_args={"num_mels": num_mels, "num_classes": len(found.classes)},
        derived=derived,
        notes=(
            _size(found, clips, num_samples),
            *split_notes,
            *_missing(found, label_N, clips["train"]),
            *found.notes,
            *_converted(layouts, row_N, sample_rate, num_samples),
            *([f"{counted(len(bad), 'damaged recording')} left out, the first: {bad[0]}"] if bad else []),
        ),
    )


def _embedded(num_clips: int, sample_rate: int, seed: int, cache_dir: str) -> Path:
    """Writes shards of the drawn words, packed as a user's own data would be."""
    drawn = {"num_clips": num_clips, "sample_rate": sample_rate, "seed": seed}

    def build(folder: Path) -> None:
        write_wavs(folder / "wavs", num_speakers=max(10, num_clips // CLIPS_OF_A_SPEAKER), **drawn)
        write_shards(folder / "wavs", folder / "shards", num=NUM_SHARDS, seed=seed)
        shutil.rmtree(folder / "wavs")

    return prepared(cache_dir, "speech_words", (), drawn | {"version": EMBEDDED_VERSION}, build) / "shards"


def _refuse_damaged(bad: list[str], limit: int, num_found: int, num_damaged: int) -> None:
    if num_found == num_damaged:
        raise DataError(f"No recording can be used; the first: {bad[0]}. Check workload.data.path.")
    if len(bad) > limit:
        allowed = "none is allowed" if limit == 0 else f"{limit} are allowed"
        raise DataError(
            f"{counted(len(bad), 'damaged recording')}, and {allowed} (workload.data.max_damaged); the first: "
            f"{bad[0]}. Repair or remove them, or raise the limit to leave them out."
        )


def _refuse_one_class(place: Path, found: FoundClips, label_N: torch.Tensor) -> None:
    if len(numbers := sorted(set(label_N.tolist()))) == 1:
        raise DataError(
            f"All recordings in workload.data.path={place} are of the class {found.classes[numbers[0]]!r}: there is "
            "nothing to tell apart. Put those of a second class beside it, in a folder of its name."
        )


def _size(found: FoundClips, clips: dict[str, torch.Tensor], num_samples: int) -> str:
    counts = {split: show_count(len(each)) for split, each in clips.items()}
    audio = show_bytes(2 * num_samples * len(clips["train"]))
    return (
        f"{counts['train']} training clips of {show_count(len(found.classes))} classes ({audio} of audio), "
        f"{counts['val']} to validate on, {counts['test']} to test on"
    )


def _missing(found: FoundClips, label_N: torch.Tensor, clip_S: torch.Tensor) -> list[str]:
    trained = set(label_N[clip_S].tolist())
    missing = [name for place, name in enumerate(found.classes) if place not in trained]
    return [f"without a clip to train on: {', '.join(missing[:10])}"] if missing else []


def _converted(layouts: Layouts, row_N: Ints, sample_rate: int, num_samples: int) -> list[str]:
    rate_N, frames_N = layouts.rate[row_N], layouts.frames[row_N]
    notes = [
        f"{counted(count, 'clip')} resampled from {show_count(rate)} to {show_count(sample_rate)} Hz"
        for rate, count in Counter(rate_N.tolist()).most_common()
        if rate != sample_rate
    ]
    if several := int((layouts.channels[row_N] > 1).sum()):
        notes.append(f"{counted(several, 'clip')} of several channels mixed down")
    wanted_N = num_samples * rate_N / sample_rate
    longer, shorter = int((frames_N > wanted_N + 1).sum()), int((frames_N < wanted_N - 1).sum())
    if longer:
        notes.append(f"{counted(longer, 'clip')} longer than clip_seconds cut to the middle")
    if shorter:
        notes.append(f"{counted(shorter, 'clip')} shorter than clip_seconds padded with silence")
    return notes


def _not_one_group(speaker: str) -> str:
    """Returns the problem of a regular expression without exactly one group; empty = none."""
    try:
        return "" if re.compile(speaker).groups == 1 else "has not one group"
    except re.error as error:
        return f"is no regular expression ({error})"
