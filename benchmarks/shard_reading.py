"""Clips out of tar shards in a global shuffle: the limit of the disk's cache, our reader, and webdataset's.

    python benchmarks/shard_reading.py [--rounds 7] [--out RECORD]

The shards are packed by `wellfed.data.shards` of wav files of a second (16 bits, 16 kHz: 32 KB), class beside
each. All of them are read once before, so this is the page cache's speed, not a disk's.

- raw: the shards one after the other by `readinto`, 4 MiB at a time; nothing is shuffled, split or returned.
- raw, shuffled: the clips in an order over all shards, by one `preadv` each into an array that is new for each batch.
- reader: `ShardReader.fill`, batches of 64 in an order over all shards, samples straight into one array.
- fetch: the same through the speech workload's training data: labels, checks, tensors.
- loader, inline / threads: the same through `train_loader`, as a run has it.
- webdataset: `WebDataset(shardshuffle=True).shuffle(1000)`, wav bytes to int16, class to int, batches of 64; and the
  same in torch's DataLoader with two workers. It shuffles among 1,000 neighbours, ours among all.
- litdata: the same clips and classes in chunks of its own, read from this disk in a shuffle.

Peers that are not installed are left out.

Every round times all of them once, in turns; a ratio is of one round. One torch thread. Beside the clock stands the
CPU time that this process took, which other processes on the machine disturb less.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import tempfile
import time
import warnings
import wave
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.measuring import compared, finish, has, interval, ratios, turned  # noqa: E402
from wellfed.data.settings import LoaderSettings  # noqa: E402
from wellfed.data.shards.shard_index import find_shards, index_shards  # noqa: E402
from wellfed.data.shards.shard_reader import ShardReader  # noqa: E402
from wellfed.data.shards.write_shards import write_shards  # noqa: E402
from wellfed.data.train_loader import train_loader  # noqa: E402
from workloads.speech.clips import ClipData  # noqa: E402
from workloads.speech.data import datasets  # noqa: E402

BATCH, SAMPLES, HEADER = 64, 16_000, 44
LOADERS = {
    "loader, inline": LoaderSettings(),
    "loader, threads": LoaderSettings("threads", num_workers=1, prefetch_factor=8),
}
RAW_BLOCK = 4 * 2**20


def make_shards(folder: Path, num_clips: int, num_shards: int) -> Path:
    """Clips of noise in ten classes."""
    rng = np.random.default_rng(0)
    for number in range(num_clips):
        place = folder / "wavs" / f"class{number % 10}"
        place.mkdir(parents=True, exist_ok=True)
        with wave.open(str(place / f"{number}.wav"), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(SAMPLES)
            file.writeframes(rng.integers(-9999, 9999, SAMPLES, dtype=np.int16).tobytes())
    write_shards(folder / "wavs", folder / "shards", num=num_shards)
    return folder / "shards"


Variants = dict[str, Callable[[], Iterator[int]]]


def decoded(sample: dict[str, Any]) -> tuple[torch.Tensor, int]:
    return torch.frombuffer(bytearray(sample["wav"]), dtype=torch.int16), int(sample["cls"])


def batches_of(data: Any, batch_size: int | None = BATCH, num_workers: int = 0) -> Iterator[int]:
    for audio, _ in torch.utils.data.DataLoader(data, batch_size=batch_size, num_workers=num_workers):
        yield len(audio)


def of_webdataset(reading: Reading, folder: Path) -> Variants:
    import webdataset

    def without_header(sample: dict[str, Any]) -> tuple[torch.Tensor, int]:
        return decoded({**sample, "wav": sample["wav"][HEADER:]})

    def data() -> Any:
        paths = [str(path) for path in reading.paths]
        whole = webdataset.WebDataset(paths, shardshuffle=len(paths), empty_check=False)
        return whole.shuffle(1000).map(without_header).batched(BATCH)

    return {
        "webdataset": lambda: batches_of(data(), None),
        "webdataset, 2 workers": lambda: batches_of(data(), None, 2),
    }


def of_litdata(reading: Reading, folder: Path) -> Variants:
    from litdata import StreamingDataset
    from litdata.streaming.writer import BinaryWriter

    written = folder / "litdata"
    written.mkdir(parents=True)
    writer = BinaryWriter(str(written), chunk_bytes=16 * 2**20)
    for number, (audio, label) in enumerate(reading.clips()):
        writer[number] = {"wav": audio, "cls": label}
    writer.done()
    writer.merge()

    class Clips(StreamingDataset):
        def __getitem__(self, index: Any) -> tuple[torch.Tensor, int]:
            return decoded(super().__getitem__(index))

    return {
        "litdata": lambda: batches_of(Clips(str(written), shuffle=True)),
        "litdata, 2 workers": lambda: batches_of(Clips(str(written), shuffle=True), num_workers=2),
    }


PEERS: dict[str, tuple[str, Callable[[Reading, Path], Variants]]] = {
    "webdataset": ("webdataset", of_webdataset),
    "litdata": ("litdata", of_litdata),
}
"""Package of each, and what writes its files and gives its variants."""


class Reading:
    """All variants over one set of shards; each is an iterator of numbers of samples."""

    def __init__(self, shards: Path, cache_dir: Path) -> None:
        self.paths = find_shards(shards)
        index = index_shards(self.paths, ["wav"], cache_dir)
        self.reader, self.num_clips = ShardReader(index, "wav"), len(index)
        data = datasets(str(shards), cache_dir=str(cache_dir), passes=1, val_frac=0.0, test_frac=0.0)
        assert isinstance(data.train, ClipData)
        self.train = data.train
        self.variants: Variants = {
            "raw": self.raw,
            "raw, shuffled": self.raw_shuffled,
            "reader": self.read,
            "fetch": self.fetch,
            **{name: partial(self.load, settings) for name, settings in LOADERS.items()},
        }
        for package, prepare in PEERS.values():
            if has(package):
                self.variants |= prepare(self, cache_dir)

    def raw(self) -> Iterator[int]:
        block = memoryview(bytearray(RAW_BLOCK))
        size, share = 0, sum(path.stat().st_size for path in self.paths) / self.num_clips
        yield 0  # the clock starts here
        for path in self.paths:
            with path.open("rb", buffering=0) as file:
                while count := file.readinto(block):
                    size += count
                    yield 0
        yield round(size / share)

    def raw_shuffled(self) -> Iterator[int]:
        files = [os.open(path, os.O_RDONLY) for path in self.paths]
        index = self.reader.index
        shard_N, offset_N = index.shards.tolist(), (index.parts["wav"][0] + HEADER).tolist()
        try:
            for rows in self.orders():
                audio = np.empty((len(rows), 2 * SAMPLES), np.uint8)
                for row, into in zip(rows.tolist(), audio, strict=True):
                    os.preadv(files[shard_N[row]], (into.data,), offset_N[row])
                yield len(rows)
        finally:
            for file in files:
                os.close(file)

    def orders(self) -> Iterator[np.ndarray[Any, Any]]:
        order = np.random.default_rng().permutation(self.num_clips)
        yield from np.split(order, range(BATCH, self.num_clips, BATCH))

    def read(self) -> Iterator[int]:
        for rows in self.orders():
            audio = np.empty((len(rows), SAMPLES), np.int16)
            self.reader.fill(rows, audio.view(np.uint8), np.full(len(rows), HEADER))
            yield len(audio)

    def fetch(self) -> Iterator[int]:
        for rows in self.orders():
            yield len(self.train.fetch(torch.from_numpy(rows))["audio"])

    def load(self, settings: LoaderSettings) -> Iterator[int]:
        with closing(train_loader(self.train, batch_size=BATCH, seed=0, settings=settings)) as loader:
            for delivery in loader:
                yield len(delivery.batch["audio"])

    def clips(self) -> Iterator[tuple[bytes, int]]:
        """Yields samples as bytes and class, for peers that write files of their own."""
        audio_class = ((batch["audio"], batch["label"]) for batch in map(self.train.fetch, self.tensors()))
        for audio_BT, class_B in audio_class:
            for audio, label in zip(audio_BT, class_B, strict=True):
                yield audio.numpy().tobytes(), int(label)

    def tensors(self) -> Iterator[torch.Tensor]:
        return map(torch.from_numpy, self.orders())

    def rate(self, name: str) -> tuple[float, float]:
        """Samples/s over all shards, and per second of this process's CPU time; what starts before the first batch is
        left out."""
        batches = self.variants[name]()
        next(batches)
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        count = sum(batches)
        cpu_s = time.process_time() - began_cpu_s
        return count / (time.perf_counter() - began_s), count / cpu_s


Rates = dict[str, list[float]]


def measure(reading: Reading, rounds: int) -> tuple[Rates, Rates]:
    """Samples/s of each variant and those per second of CPU time, one a round; the first round is dropped."""
    by_wall: Rates = {name: [] for name in reading.variants}
    by_cpu: Rates = {name: [] for name in reading.variants}
    for number in range(rounds + 1):
        for name in turned(by_wall, number):
            wall, cpu = reading.rate(name)
            if number:
                by_wall[name].append(wall)
                by_cpu[name].append(cpu)
    return by_wall, by_cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--clips", type=int, default=8000)
    parser.add_argument("--shards", type=int, default=16)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="webdataset")
    with tempfile.TemporaryDirectory() as folder:
        shards = make_shards(Path(folder), chosen.clips, chosen.shards)
        raw, by_cpu = measure(Reading(shards, Path(folder) / "cache"), chosen.rounds)
    results: list[dict[str, Any]] = []
    for name, rates in raw.items():
        result: dict[str, Any] = {
            "variant": name,
            "n": len(rates),
            "samples_per_s_mean": statistics.fmean(rates),
            "samples_per_s_sd": statistics.stdev(rates),
        }
        for other in raw.keys() & {"raw", "webdataset", "webdataset, 2 workers"}:
            result[f"ratio_to_{other}_median"] = statistics.median(ratios(raw, name, other))
            result[f"ratio_to_{other}_ci95"] = interval(ratios(raw, name, other))
        if "workers" not in name:  # their CPU time is not this process's
            for other in raw.keys() & {"raw", "webdataset"}:
                result[f"cpu_ratio_to_{other}_median"] = statistics.median(ratios(by_cpu, name, other))
        results.append(result)
        print({key: round(value, 3) if isinstance(value, float) else value for key, value in result.items()})
    told = {each["variant"]: each for each in results}
    says = "; ".join(
        f"{name}: {told[name]['ratio_to_raw_median']:.2f} of raw "
        f"(by CPU time {told[name]['cpu_ratio_to_raw_median']:.2f})"
        for name in itertools.islice(told, 1, 6)
    )
    best = [max(each) for each in zip(*(raw[name] for name in LOADERS), strict=True)]
    peers: dict[str, list[float] | None] = {"the raw read, in order": raw["raw"]}
    peers["the raw read, shuffled"] = raw["raw, shuffled"]
    for name in PEERS:
        with_workers = [raw[each] for each in (name, f"{name}, 2 workers") if each in raw]
        peers[name] = [max(each) for each in zip(*with_workers, strict=True)] or None
    rows = compared("clips of 32 KB out of tar shards, shuffled", "samples/s", best, peers)
    config = {
        "clips": chosen.clips,
        "shards": chosen.shards,
        "bytes_of_a_clip": 2 * SAMPLES,
        "batch": BATCH,
        "threads": 1,
        "page_cache": "warm",
        "ours": {name: vars(settings) for name, settings in LOADERS.items()},
    }
    says = f"Global shuffle, clips of 32 KB: {says}."
    finish("shard_reading", results, says, chosen.out, config=config, compared=rows)


if __name__ == "__main__":
    main()
