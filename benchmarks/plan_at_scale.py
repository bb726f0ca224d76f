"""What does a run on 8 to 4,096 GPUs share out, open, send and write? Counted by the project's own code, in seconds.

    python benchmarks/plan_at_scale.py [--ranks 8,64,512,4096] [--batch 8192] [--start-up] [--out RECORD]

Starts no second process: what a rank takes is a function of its number, and here one process does what each would do.
Figures are counts and bytes, which don't depend on how busy this machine is. What is multiplied and not done is marked
computed in the record; docs/scaling.md says what it means. ``--start-up`` needs strace: it counts the files that one
rank opens, and looks for, until its first steps are done.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import itertools
import math
import os
import pickle
import re
import subprocess
import sys
import tempfile
import wave
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import torch  # noqa: E402

from benchmarks.measuring import finish  # noqa: E402
from tests.kit.machines import card, machine  # noqa: E402
from wellfed.config.compose import compose  # noqa: E402
from wellfed.config.rules import batch_split  # noqa: E402
from wellfed.config.schema import RunConfig  # noqa: E402
from wellfed.data.epoch_order import LISTED, EpochOrder  # noqa: E402
from wellfed.data.eval_loader import EvalLoader  # noqa: E402
from wellfed.data.shards.shard_index import find_shards, index_shards  # noqa: E402
from wellfed.data.shards.shard_reader import ShardReader  # noqa: E402
from wellfed.data.shards.write_shards import write_shards  # noqa: E402
from wellfed.observe.loggers.journal import Journal  # noqa: E402
from wellfed.observe.telemetry.machines import HOST, of_node  # noqa: E402
from wellfed.observe.telemetry.metrics import GPU_METRICS, HOST_METRICS, SLOW_S, Metric  # noqa: E402
from wellfed.observe.telemetry.series import Sample, Summary  # noqa: E402
from wellfed.plan.decide import plan_run  # noqa: E402
from wellfed.plan.device import plan_device  # noqa: E402
from wellfed.plan.run_plan import DataFacts, ModelFacts, StreamFacts  # noqa: E402
from wellfed.record import RunRecord  # noqa: E402
from wellfed.run.objects.optimizers import states_per_parameter  # noqa: E402
from wellfed.units import show_bytes  # noqa: E402

OF_A_NODE = 8
SAMPLES = 50_000
PARAMETERS = {"0.1 B": 124e6, "1.3 B": 1.3e9, "7 B": 7e9, "70 B": 70e9}
NUM_SHARDS, CLIPS = 64, 640
Row = dict[str, Any]


def config_of(world: int, effective: int) -> RunConfig:
    """Nodes of eight cards each."""
    base = compose([]).config
    trainer = replace(base.trainer, devices=min(world, OF_A_NODE), num_nodes=max(1, world // OF_A_NODE))
    return replace(base, workload=replace(base.workload, effective_batch_size=effective), trainer=trainer)


def steps(world: int, effective: int) -> Row:
    """What each rank has of a step, and of the last of an epoch; the order is that of one rank."""
    config = config_of(world, effective)
    if faults := [str(fault) for fault in batch_split(config)]:
        return {"refused": faults[0]}
    facts, data = machine(*map(card, range(OF_A_NODE)), cores=64.0), DataFacts(SAMPLES, has_fetch=True)
    plan = plan_run(config, {}, facts, plan_device(config, {}, facts), data, ModelFacts(10**9, 10**9, 2 * 10**9))
    common: Any = {"num_samples": SAMPLES, "batch_size": effective, "seed": 1}
    alone, sizes, idle = EpochOrder(**common), set(), 0
    digests = [hashlib.sha256() for _ in range(alone.num_batches)]
    order = alone.order(0)
    for rank in range(world):
        own = EpochOrder(**common, rank=rank, world_size=world)
        own._cached = (0, [order])  # which each rank draws for itself: tests/every/test_world_sizes.py lets each do so
        for batch, digest in enumerate(digests):
            share = own.share(0, batch)
            if batch + 1 < len(digests):
                sizes.add(len(share.indices))
            idle += share.is_padding
            if not share.is_padding:
                digest.update(share.indices.numpy().tobytes())
    whole = [hashlib.sha256(alone.share(0, batch).indices.numpy().tobytes()) for batch in range(alone.num_batches)]
    return {
        "samples_of_a_rank": [min(sizes), max(sizes)],
        "micro_batch": plan.memory.micro_batch,
        "idle_frac": 1 - effective / (world * max(sizes)),
        "ranks_without_samples_in_the_last_step": idle,
        "is_the_order_of_one_rank": [one.digest() for one in digests] == [one.digest() for one in whole],
    }


def streams(world: int, num_shards: int) -> Row:
    """A stream of so many shards: refused, or how many a rank has, and what is idle meanwhile."""
    config, facts = config_of(world, 10 * world), machine(*map(card, range(OF_A_NODE)), cores=64.0)
    stream = StreamFacts(
        "Stream", has_length=True, gives_batches=False, shared_by="shard", shares_ranks_itself=False,
        num_shards=num_shards,
    )  # fmt: skip
    data = DataFacts(10**6, has_fetch=False, stream=stream)
    try:
        plan = plan_run(config, {}, facts, plan_device(config, {}, facts), data, ModelFacts(10**6, 10**6, 10**6))
    except Exception as error:  # noqa: BLE001
        return {"shards": num_shards, "refused": str(error).splitlines()[-1].strip()}
    most = math.ceil(num_shards / world)
    told = any("without samples" in warning for warning in plan.warnings)
    return {"shards": num_shards, "of_a_rank": most, "idle_frac": 1 - num_shards / (world * most), "is_told": told}


class _Rows:
    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def fetch(self, indices: torch.Tensor, rng: Any) -> torch.Tensor:
        return indices

    def __getitem__(self, index: int) -> int:
        return index


def evaluation(world: int, num_batches: int) -> Row:
    """Returns the shares of an evaluation over a number of batches."""
    data = _Rows(num_batches)
    of_ranks = [EvalLoader(data, 1, seed=1, rank=rank, world_size=world) for rank in range(world)]
    held = [len(one._numbers) for one in of_ranks]
    return {
        "batches": num_batches,
        "of_a_rank": len(of_ranks[0]),
        "ranks_without_one": held.count(0),
        "is_complete": sum(held) == num_batches and {len(one) for one in of_ranks} == {math.ceil(num_batches / world)},
    }


def tar_shards() -> Row:
    """Returns the files that a rank opens of indexed tar shards, and the memory that it holds for them."""
    with tempfile.TemporaryDirectory() as folder:
        clips = Path(folder) / "clips" / "word"
        clips.mkdir(parents=True)
        for number in range(CLIPS):
            with wave.open(str(clips / f"{number}.wav"), "wb") as file:
                file.setparams((1, 2, 16000, 0, "NONE", ""))
                file.writeframes(bytes(200))
        write_shards(Path(folder) / "clips", Path(folder) / "shards", num=NUM_SHARDS)
        paths = find_shards(Path(folder) / "shards")
        index_shards(paths, ["wav"], Path(folder) / "cache")
        with Opens() as opened:
            index = index_shards(paths, ["wav"], Path(folder) / "cache")
        reader = ShardReader(index, "wav")
        for row in range(CLIPS):
            reader.read(torch.tensor([row]).numpy())
        held = int((reader._files >= 0).sum())
    return {
        "opens_of_a_shard": sum(opened.values()) / NUM_SHARDS,
        "index_bytes_of_a_sample": len(pickle.dumps(index)) / CLIPS,
        "descriptors_of_a_process": f"{held} of {NUM_SHARDS} shards",
    }


class Opens:
    """Counts files that are opened within."""

    _counting: Counter[str] | None = None
    _is_hooked = False

    def __enter__(self) -> Counter[str]:
        kind = type(self)
        if not kind._is_hooked:
            kind._is_hooked = True
            sys.addaudithook(kind._hook)
        kind._counting = Counter()
        return kind._counting

    def __exit__(self, *_: object) -> None:
        type(self)._counting = None

    @classmethod
    def _hook(cls, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and cls._counting is not None and isinstance(arguments[0], (str, bytes)):
            cls._counting["open"] += 1


def watching(worlds: Sequence[int]) -> list[Row]:
    """Bytes of telemetry and of run.json, as the product writes them: a number for each GPU and each host of a node."""
    rows = []
    for world in worlds:
        places = [divmod(rank, OF_A_NODE) for rank in range(world)]
        summary = Summary(lambda from_s, to_s: to_s - from_s)
        for time_s in (1.0, 2.0):
            summary.add([Sample(time_s, 1, "train", of_node(*place), _values(GPU_METRICS)) for place in places])
        record = RunRecord.start("run")
        of_others = [{"node": node, "host": f"node{node}"} if node else {} for node, _ in places]
        gpus = [{**asdict(card(gpu)), **more} for (_, gpu), more in zip(places, of_others, strict=True)]
        record.machine = {"gpus": gpus}
        before = len(replace(record, machine={}).to_json())
        record.gpus = summary.entry(1000, 10.0)
        row: Row = {"ranks": world, "run_json_mib": (len(record.to_json()) - before) / 2**20}
        for interval_s in (0.5, 10.0):
            num_rows, num_bytes = _telemetry_of_an_hour(world, interval_s)
            row |= {f"rows_at_{interval_s:g}_s": num_rows, f"at_{interval_s:g}_s_gib": num_bytes / 2**30}
        rows.append(row)
    return rows


def _telemetry_of_an_hour(world: int, interval_s: float) -> tuple[int, float]:
    """Rows and bytes of telemetry.csv: those of one full round and of the others until the next, taken as often."""
    gpus = [of_node(*divmod(rank, OF_A_NODE)) for rank in range(world)]
    hosts = [of_node(node, HOST) for node in range(math.ceil(world / OF_A_NODE))]
    rounds = max(1, round(SLOW_S / interval_s))
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(RunRecord.start("run"), Path(folder))
        path = Path(folder) / "telemetry.csv"
        journal.telemetry([Sample(1234.5, 1000, "train", HOST, {})])
        head = path.stat().st_size
        for number in range(rounds):
            for places, metrics in ((gpus, GPU_METRICS), (hosts, HOST_METRICS)):
                read = _values(metric for metric in metrics if metric.rate == "fast" or number == 0)
                journal.telemetry([Sample(1234.5 + number / 2, 1000, "train", place, read) for place in places])
        written = path.stat().st_size - head
    times = 3600 / interval_s / rounds
    return round(times * rounds * (len(gpus) + len(hosts))), times * written


def _values(metrics: Iterable[Metric]) -> dict[str, float]:
    return {metric.name: 12.345678 + place for place, metric in enumerate(metrics)}


def checkpoints() -> list[Row]:
    """Returns sizes of float32 checkpoints with AdamW: measured for a small model, computed for large ones."""
    states = states_per_parameter({"_target_": "torch.optim.AdamW", "lr": 0.1})
    model = torch.nn.Linear(1000, 1000, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 1000)).sum().backward()
    optimizer.step()
    file = io.BytesIO()
    torch.save({"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()]}, file)
    of_a_parameter = file.tell() / 1e6
    return [
        {
            "parameters": name,
            "file_gib": count * of_a_parameter / 2**30,
            "bytes_of_a_parameter": of_a_parameter,
            "ddp_on_each_card_gib": count * 4 * (1 + 1 + 1 + states) / 2**30,
            "fsdp_host_of_a_node_gib": count * 4 * 3 * OF_A_NODE / 2**30,
        }
        for name, count in PARAMETERS.items()
    ]


def agreeing(world: int) -> Row:
    """One after the other: messages until all know what one knows, and what the ranks have to say before training."""
    told = len(pickle.dumps(compose([])))
    return {
        "messages_of_an_all_reduce": 2 * (world - 1),
        "broadcasts_of_an_evaluation": 2 * world,
        "connections_of_a_gloo_group": world - 1,
        "connections_of_rank_0": world - 1,
        "told_by_rank_0_mib": (world - 1) * told / 2**20,
    }


def start_up(folder: Path) -> Row:
    """Files that a run of two steps opens, and asks for, on one rank."""
    trace = folder / "trace"
    words = ["trainer.max_steps=2", "trainer.max_epochs=null", "logger=none", "telemetry=none", "loader=baseline"]
    words += ["trainer.accelerator=cpu", f"hydra.run.dir={folder / 'run'}", f"paths.cache_dir={folder / 'cache'}"]
    traced = ["strace", "-f", "-qq", "-e", "trace=openat,newfstatat,stat,readlink", "-o", str(trace)]
    command = [*traced, sys.executable, str(ROOT / "src" / "train.py"), *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: Counter[str] = Counter()
    for call, path, is_there in traced_calls(trace.read_text(encoding="utf-8", errors="replace").splitlines()):
        what = "opened" if call == "openat" and is_there else "asked_for"
        place = "libraries" if "site-packages" in path else "project" if str(ROOT) in path else "others"
        found[f"{what}, {place}"] += 1
    return dict(sorted(found.items()))


def traced_calls(lines: Iterable[str]) -> Iterator[tuple[str, str, bool]]:
    """Yields calls from strace's output: name, file, and whether the file exists."""
    begun: dict[str, tuple[str, str]] = {}
    for line in lines:
        called = re.match(r'(\d+) +(\w+)\([^"]*"([^"]+)"', line)
        resumed = re.match(r"(\d+) +<\.\.\. \w+ resumed>", line)
        if called:
            begun[called[1]] = called[2], called[3]
        if (called or resumed) and (result := re.search(r" = (-?\d+)[^=]*$", line)):
            pid = (called or resumed)[1]  # type: ignore[index]
            if pid in begun:
                yield *begun.pop(pid), int(result[1]) >= 0


def show(title: str, rows: Sequence[Row]) -> Iterator[str]:
    """A table of rows, and below it why there are no figures of some."""
    names = [name for name in dict.fromkeys(itertools.chain(*rows)) if name != "refused"]
    cells = [names, *([_cell(name, row.get(name)) for name in names] for row in rows)]
    widths = [max(len(row[place]) for row in cells) for place in range(len(names))]
    yield f"\n{title}"
    for row in cells:
        yield "  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    for reason in dict.fromkeys(str(row["refused"]) for row in rows if "refused" in row):
        yield f"  refused: {reason}"


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if name.endswith("_frac"):
        return f"{value:.1%}"
    if name.endswith("_gib"):
        return show_bytes(int(value * 2**30))
    return f"{value:,.1f}" if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", default="8,64,512,4096")
    parser.add_argument("--batch", type=int, default=8192, help="samples of a step over all ranks (default 8192)")
    parser.add_argument("--start-up", action="store_true", help="count what one rank opens (needs strace)")
    parser.add_argument("--out", type=Path, help="file of the record")
    asked = parser.parse_args()
    worlds = [int(count) for count in asked.ranks.split(",")]
    few = config_of(8, asked.batch).workload.name
    tables: dict[str, list[Row]] = {
        f"steps of {asked.batch:,} samples": [{"ranks": w, **steps(w, asked.batch)} for w in worlds],
        f"steps of 2,048 samples ({few})": [{"ranks": w, **steps(w, 2048)} for w in worlds],
        "streams": [{"ranks": w, **streams(w, shards)} for w in worlds for shards in (1000, 1024, 8192)],
        "evaluation": [{"ranks": w, **evaluation(w, batches)} for w in worlds for batches in (100, 5000)],
        "order of an epoch (computed: 4 bytes a sample while it is listed)": [
            {"samples": count, "of_a_rank_gib": size, "of_a_node_gib": OF_A_NODE * size}
            for count in (10**6, 10**7, 10**9)
            for size in [count * 4 / 2**30 if count <= LISTED else 0.0]
        ],
        "tar shards": [tar_shards()],
        "checkpoints and what else is held (computed)": checkpoints(),
        "telemetry and record": watching(worlds),
        "agreements (computed)": [{"ranks": w, **agreeing(w)} for w in worlds],
    }
    if asked.start_up:
        with tempfile.TemporaryDirectory() as folder:
            tables["start-up of a rank"] = [start_up(Path(folder))]
    for title, rows in tables.items():
        print("\n".join(show(title, rows)))
    is_same = all(row.get("is_the_order_of_one_rank", True) for rows in tables.values() for row in rows)
    about = {"python": sys.version.split()[0], "torch": torch.__version__, "note": "counts and bytes, no times"}
    says = (
        f"For {', '.join(map(str, worlds))} ranks the samples of a step "
        f"{'are those of one rank, in its order' if is_same else 'ARE NOT those of one rank'}."
    )
    finish(
        "plan_at_scale",
        [{"table": title, "rows": rows} for title, rows in tables.items()],
        says,
        asked.out,
        config={"ranks": worlds, "batch": asked.batch, "samples": SAMPLES, "of_a_node": OF_A_NODE},
        machine=about,
    )


if __name__ == "__main__":
    main()
