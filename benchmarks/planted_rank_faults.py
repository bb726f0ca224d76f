"""Plants a fault on one rank of a real run: is this rank the first finding, with the cause on it?

    python benchmarks/planted_rank_faults.py [--only input_inline] [--ranks 2] [--where cpu] [--out RECORD]
    python benchmarks/planted_rank_faults.py --list

Ranks are processes of this machine, started as torchrun starts them, that train with `src/train.py`. They use Gloo, on
the CPU or on simulated cards (tests/fake_cuda, tests/fake_nvml), with DDP or FSDP. One rank has the fault. The first
finding of run.json must have the cause as its id and the rank in its figures; a cause that is a note must be among
them. No finding about ranks may accuse a healthy run, and a run that fails is never right. Where other programs take
the machine, ``busy_machine`` comes first and is passed over.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, get_type_hints

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src"), str(ROOT / "benchmarks")]

import lightning.pytorch as pl  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from wellfed.contract import Datasets, LossOutput  # noqa: E402
from wellfed.ranks import own_rank  # noqa: E402
from wellfed.sample_rng import SampleRng  # noqa: E402

STEP_MS, BATCH, FEATURES, LENGTH, CLASSES = 30.0, 32, 8, 64, 4
"""Milliseconds of a step without a fault, samples of a rank's batch, and sizes of the samples."""
CARD_SIZE, CARD_MS = 128, 2.0
"""Rows of a square matrix, and about the milliseconds that a simulated card takes for a product of two."""
SIGNALS = "PLANTED_SIGNALS"
"""Variable that names the folder in which rank 0 leaves a file ``begun`` once its steps have begun."""
TIMEOUT_S = 240


class Sequences:
    """Sequences whose first value decides their class; all or some ranks build them slowly."""

    def __init__(self, num: int, *, build_ms: float = 0.0, longer: float = 1.0, stall_period_s: float = 0.0) -> None:
        """``longer``: factor on the length of this rank's sequences. ``stall_period_s``: the storage stands still for
        the second half of each such period."""
        made = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(num, int(LENGTH * longer), FEATURES, generator=made)
        self.labels = (self.inputs[:, 0, 0] * 2).round().long().clamp(-2, 1) + 2
        self.build_s, self.stall_period_s, self.began_s = 1e-3 * build_ms, stall_period_s, time.monotonic()

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"inputs": self.inputs[index], "labels": self.labels[index]}

    def fetch(self, indices: Tensor, rng: SampleRng) -> dict[str, Tensor]:
        since_s = (time.monotonic() - self.began_s) % self.stall_period_s if self.stall_period_s else 0.0
        time.sleep(self.build_s + (self.stall_period_s - since_s if since_s > self.stall_period_s / 2 else 0.0))
        return {"inputs": self.inputs[indices], "labels": self.labels[indices]}


def data(slow_rank: int, fault: Mapping[str, float], build_ms: float = 1.0) -> Datasets:
    """Returns sequences, with the fault on the slow rank alone."""
    own = dict(fault) if own_rank() == slow_rank else {}
    return Datasets(Sequences(64 * BATCH, **{"build_ms": build_ms, **own}))


class Net(nn.Module):
    """The mean of an embedded sequence through a linear layer, in steps of about `STEP_MS` a rank.

    Args:
        slow_rank: the rank that ``factor``, ``keeps_mib`` and ``pinned`` are for.
        factor: factor on the time of its forward pass.
        keeps_mib: memory that it holds.
        pinned: whether it may use the first CPU alone.
        works: whether a forward pass computes on the host, instead of resting as beside a device.
        values: further weights, whose gradients are averaged.
        link_gb_s: rate at which gradients go from rank to rank; 0 = as fast as they do.
        parallel: whether one process computes on all cards, by DataParallel.
    """

    def __init__(
        self,
        slow_rank: int,
        *,
        step_ms: float = STEP_MS,
        factor: float = 1.0,
        keeps_mib: int = 0,
        pinned: bool = False,
        works: bool = False,
        values: int = 0,
        link_gb_s: float = 0.0,
        parallel: bool = False,
    ) -> None:
        super().__init__()
        self.embed: nn.Module = nn.Linear(FEATURES, 32)
        self.head = nn.Linear(32, CLASSES)
        if parallel:
            self.embed, step_ms = nn.DataParallel(Busy(FEATURES, 32, step_ms)), 0.0
        self.wide = nn.Parameter(torch.zeros(values)) if values else None
        self.passes, self.works, self.step_s = 0, works, 1e-3 * step_ms
        self.kept: Tensor | None = None
        self.keeps_mib = 0
        if own_rank() == slow_rank:
            self.step_s, self.keeps_mib = factor * self.step_s, keeps_mib
        if pinned:
            cpus = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, {cpus[0 if own_rank() == slow_rank else -1]})
        if link_gb_s:
            _slow_down_link(link_gb_s)

    def loss(self, batch: Mapping[str, Tensor]) -> LossOutput:
        inputs = batch["inputs"]
        self.passes += 1
        if self.passes == 3 and own_rank() == 0 and SIGNALS in os.environ:
            (Path(os.environ[SIGNALS]) / "begun").touch()
        if self.keeps_mib and self.kept is None:
            self.kept = torch.ones(self.keeps_mib * 2**18, device=inputs.device)
        loss = nn.functional.cross_entropy(self.head(self.embed(inputs).relu().mean(1)), batch["labels"])
        if self.wide is not None:
            loss = loss + 0 * self.wide.sum()
        if self.training:
            self._take(self.step_s * inputs.shape[1] / LENGTH, inputs.device)
        return LossOutput(loss)

    def _take(self, seconds: float, device: torch.device) -> None:
        if device.type == "cuda":
            _multiply(1e3 * seconds, device)
        elif self.works:
            began_s = time.thread_time()
            while time.thread_time() - began_s < seconds:
                sum(range(1000))
        else:
            time.sleep(seconds)


class Busy(nn.Linear):
    """A layer that takes its time on the card of its input."""

    def __init__(self, features: int, outputs: int, step_ms: float) -> None:
        super().__init__(features, outputs)
        self.step_ms = step_ms

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            _multiply(self.step_ms, inputs.device)
        return super().forward(inputs)


def _multiply(for_ms: float, device: torch.device) -> None:
    square = torch.ones(CARD_SIZE, CARD_SIZE, device=device)
    for _ in range(round(for_ms / CARD_MS)):
        torch.mm(square, square)


def _slow_down_link(gb_s: float) -> None:
    """Makes sums over the ranks take as long as a link of this rate needs, those of torch's DDP too."""
    if dist.all_reduce.__name__ == "slowly":  # a second model
        return
    reduce, make = dist.all_reduce, DistributedDataParallel.__init__
    link = ThreadPoolExecutor(1)

    def slowly(tensor: Tensor, *more: Any, **named: Any) -> Any:
        time.sleep(tensor.nbytes / (1e9 * gb_s))
        return reduce(tensor, *more, **named)

    def beside(_: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        mean: torch.futures.Future[Tensor] = torch.futures.Future()

        def send() -> None:
            slowly(bucket.buffer())
            mean.set_result(bucket.buffer().div_(dist.get_world_size()))

        link.submit(send)
        return mean

    def with_link(self: DistributedDataParallel, *given: Any, **named: Any) -> None:
        make(self, *given, **named)
        self.register_comm_hook(None, beside)

    beside.__annotations__ = get_type_hints(beside)  # torch compares them, and this module's are texts
    dist.all_reduce = slowly  # type: ignore[assignment]
    DistributedDataParallel.__init__ = with_link  # type: ignore[method-assign]


class RankPause(pl.Callback):
    """Pause of one rank after each step."""

    def __init__(self, slow_rank: int, pause_ms: float) -> None:
        self.pause_s = 1e-3 * pause_ms if own_rank() == slow_rank else 0.0

    def on_train_batch_end(self, *_: Any) -> None:
        time.sleep(self.pause_s)


@dataclass(frozen=True)
class RankFault:
    """A fault of one rank, and how it is planted there; a healthy run has the cause ``healthy``."""

    kind: str
    cause: str
    where: str = "cpu"
    strategy: str = "ddp"
    data: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `Sequences` on the slow rank."""
    model: Mapping[str, Any] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    """Variables of the slow rank's process, as those of a card that differs."""
    burners: int = 0
    """Processes on the first CPU while the ranks train."""
    of_all: bool = False
    """Whether no single rank is at fault."""
    is_note: bool = False
    most_ranks: int = 4
    """Maximum number of ranks with which it is a fault."""
    pause_ms: float = 0.0
    steps: int = 70
    cards: int = 0
    """Cards that one process drives; 0 = each rank has one."""


INLINE = ("loader.backend=inline", "loader.num_workers=0")
WORKER = ("loader.backend=processes", "loader.num_workers=1")
BY_STEP = ("loader.pin_memory=false", "loader.device_prefetch=0")
ON_CPU = (
    RankFault("input_inline", "input_straggler", data={"build_ms": 40.0}, overrides=INLINE),
    RankFault("input_worker", "input_straggler", data={"build_ms": 150.0}, overrides=WORKER),
    RankFault("slow_forward", "compute_straggler", model={"factor": 1.6}),
    RankFault("long_sequences", "uneven_shares", data={"longer": 1.75}),
    RankFault("callback_on_one_rank", "host_straggler", pause_ms=20.0),
    # Of more ranks than CPUs, those without the fault would take one another's CPU.
    RankFault("cpu_taken", "slow_machine", model={"works": True, "pinned": True}, burners=2, most_ranks=2),
    RankFault("slow_link", "slow_link", model={"step_ms": 10.0, "values": 4_000_000, "link_gb_s": 0.2}, of_all=True),
    RankFault("memory_of_one_rank", "uneven_memory", model={"keeps_mib": 1500}, is_note=True),
)
ON_CARDS = (
    RankFault("more_kernels", "compute_straggler", "simulated", model={"factor": 1.6}),
    *(fault for strategy in ("ddp", "fsdp") for fault in (
        RankFault("input_inline", "input_straggler", "simulated", strategy, {"build_ms": 150.0}, overrides=INLINE),
        RankFault("slow_copy", "copy_straggler", "simulated", strategy, overrides=BY_STEP,
                  variables={"FAKE_CUDA_PAGEABLE_GBPS": "0.003"}),
        RankFault("hot_card", "slow_gpu", "simulated", strategy, variables={"FAKE_CUDA_THROTTLE": "0.2:0.5:heat"},
                  steps=160),
        RankFault("long_sequences", "uneven_shares", "simulated", strategy, {"longer": 1.75},
                  is_note=strategy == "fsdp"),
    )),
    RankFault("stalls_of_data_parallel", "slow_storage", "simulated", "auto", {"stall_period_s": 9.5},
              {"parallel": True, "step_ms": 8.0}, (*INLINE, "trainer.max_time_s=75"),
              {"FAKE_CUDA_KERNEL_US": "2000"}, of_all=True, steps=10_000, cards=4),
)  # fmt: skip
HEALTHY = (
    RankFault("healthy", "healthy"),
    RankFault("healthy_workers", "healthy", overrides=WORKER),
    RankFault("healthy_works", "healthy", model={"works": True, "step_ms": 10.0}),
    RankFault("healthy", "healthy", "simulated"),
    RankFault("healthy", "healthy", "simulated", "fsdp"),
)
FAULTS = (*ON_CPU, *ON_CARDS, *HEALTHY)
ABOUT_RANKS = {one.cause for one in FAULTS} - {"healthy"}
CARD: Mapping[str, Any] = {
    **{"mib": 4096, "context_mib": 100, "slowdown": 3.0, "launch_us": 5.0, "copy_gbps": 12.0, "pageable_gbps": 4.0},
    **{"tflops": 0.001, "tensor_tflops": 0.004, "dram_gbps": 1.0, "sms": 16, "kernel_us": 20.0},
}


@dataclass
class RankVerdict:
    """Findings of a planted run against the fault."""

    fault: str
    ranks: int
    strategy: str
    device: str
    slow_rank: int | None
    cause: str
    named_rank: int | None
    named_cause: str
    is_right: bool
    is_busy: bool
    is_note: bool
    said: str
    others: list[str]


class RankMachine:
    """Runs ranks on the CPU or on simulated cards; a context manager."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._stack, self._number = folder, contextlib.ExitStack(), 0
        self._pythons: dict[tuple[str, int], Any] = {}

    def __enter__(self) -> RankMachine:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @cached_property
    def _driver(self) -> Any:
        from tests.fake_cuda.machine import compile_driver
        from tests.fake_nvml.driver import FakeDriver

        compile_driver()
        return FakeDriver(Path("cc"), self._folder)

    def run(self, fault: RankFault, ranks: int, slow_rank: int) -> tuple[Path | None, str]:
        """Trains with the fault; returns the run folder, and what rank 0 printed."""
        self._number += 1
        place = self._folder / f"{self._number:03d}_{fault.kind}_{fault.where}_{fault.strategy}_{ranks}"
        place.mkdir()
        arguments = [str(ROOT / "src" / "train.py"), *self._typed(fault, ranks, slow_rank, place)]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])

        def one(rank: int) -> str:
            printed = place / f"rank{rank}.txt"
            variables = {
                **_launch(rank, ranks, _nodes(fault, ranks), port),
                **self._cards(fault, ranks, place),
                SIGNALS: str(place),
            }
            if rank == slow_rank:
                variables |= fault.variables
            python = self._python(fault.where, rank)
            python.run(arguments, printed, variables=variables, folder=place, timeout_s=TIMEOUT_S)
            return printed.read_text(errors="replace")

        for rank in range(ranks):
            self._python(fault.where, rank)  # imports torch
        with _burning(fault.burners, place), ThreadPoolExecutor(ranks) as pool:
            printed = list(pool.map(one, range(ranks)))
        found = list(place.glob("logs/*/runs/*/run.json"))
        return (found[0].parent if found else None), "\n".join(text[-1500:] for text in printed)

    def _typed(self, fault: RankFault, ranks: int, slow_rank: int, place: Path) -> list[str]:
        configs = place / "configs" / "workload"
        configs.mkdir(parents=True)
        model = "".join(f", {name}: {str(value).lower()}" for name, value in fault.model.items())
        planted = "".join(f"{name}: {value}, " for name, value in fault.data.items())
        (configs / "ranks.yaml").write_text(
            f"""name: ranks
sample_unit: sequences
effective_batch_size: {ranks * BATCH}
model: {{_target_: planted_rank_faults.Net, slow_rank: {slow_rank}{model}}}
data: {{_target_: planted_rank_faults.data, slow_rank: {slow_rank}, fault: {{{planted.rstrip(", ")}}}}}
optimizer: {{_target_: torch.optim.AdamW, lr: 0.001}}
""",
            encoding="utf-8",
        )
        pause, nodes = (), _nodes(fault, ranks)
        if fault.pause_ms:
            target = "_target_: planted_rank_faults.RankPause"
            pause = (f"+callbacks.pause={{{target}, slow_rank: {slow_rank}, pause_ms: {fault.pause_ms}}}",)
        return [
            *("--config-dir", str(place / "configs"), "config.allow_targets=[planted_rank_faults,torch,lightning]"),
            *("workload=ranks", "logger=none", f"paths.log_dir={place}/logs", f"paths.cache_dir={place}/cache"),
            *(
                f"trainer.num_nodes={nodes}",
                f"trainer.devices={ranks // nodes}",
                f"trainer.strategy={fault.strategy}",
                f"trainer.max_steps={fault.steps}",
            ),
            *("telemetry.interval_s=0.2", "telemetry.ceiling_steps=0", "trainer.checkpoint_every_steps=1000"),
            f"trainer.accelerator={'cpu' if fault.where == 'cpu' else 'gpu'}",
            *pause,
            *fault.overrides,
        ]

    def _cards(self, fault: RankFault, ranks: int, place: Path) -> dict[str, str]:
        if fault.where == "cpu":
            return {}
        from tests.fake_cuda.machine import Cards, machine_environment

        found = machine_environment(self._driver, place, Cards(cards=fault.cards or ranks, **CARD))
        return {name: value for name, value in found.items() if name not in ("PYTHONPATH", "LD_LIBRARY_PATH")}

    def _python(self, where: str, rank: int) -> Any:
        """Returns a Python that has imported torch, one for each rank that runs at once."""
        if (where, rank) not in self._pythons:
            from warm_python import WarmPython

            from tests.fake_cuda.machine import SITE, Cards, machine_environment

            path = [str(ROOT / "src"), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
            variables = {"CUDA_VISIBLE_DEVICES": ""}
            if where == "simulated":
                path.insert(0, str(SITE))
                variables = machine_environment(self._driver, self._folder, Cards(cards=4)) | {"FAKE_CUDA_LATER": "1"}
            variables |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, path))}
            self._pythons[where, rank] = self._stack.enter_context(WarmPython(variables))
        return self._pythons[where, rank]


def _nodes(fault: RankFault, ranks: int) -> int:
    """Returns the number of machines that the ranks count as: on a CPU, a run may have a rank for each core of one."""
    return max(1, ranks // 2) if fault.where == "cpu" else 1


def _launch(rank: int, ranks: int, nodes: int, port: str) -> dict[str, str]:
    """Returns the variables of torchrun."""
    here = ranks // nodes
    return {
        **{"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_USE_AGENT_STORE": "False"},
        **{"RANK": str(rank), "LOCAL_RANK": str(rank % here), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(here)},
        **{
            "GROUP_RANK": str(rank // here),
            "GROUP_WORLD_SIZE": str(nodes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        },
    }


@contextlib.contextmanager
def _burning(number: int, place: Path) -> Iterator[None]:
    """Keeps the first CPU busy within the block, once the steps have begun."""
    code = (
        "import os, time\n"
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        f"while not os.path.exists({str(place / 'begun')!r}): time.sleep(0.05)\n"
        "while True: pass"
    )
    burning = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(number)]
    try:
        yield
    finally:
        for process in burning:
            process.kill()
            process.wait()


def judge(machine: RankMachine, fault: RankFault, ranks: int, slow_rank: int) -> RankVerdict:
    """Plants the fault and compares the first finding with it."""
    from wellfed.record import RunRecord

    folder, printed = machine.run(fault, ranks, slow_rank)
    record = None if folder is None else RunRecord.read(folder)
    has_run = record is not None and record.status == "ok" and record.throughput is not None
    if record is None or not has_run:
        print(f"{fault.kind} on {ranks} ranks has failed:\n{printed}", flush=True)
        record = RunRecord("failed", exit_code=1)
    is_busy = any(one["id"] == "busy_machine" for one in record.findings)
    found = [one for one in record.findings if one["id"] != "busy_machine"]
    first = found[0] if found else None
    if fault.is_note:
        first = next((one for one in found if one["id"] == fault.cause), first)
    named = None if first is None else first["evidence"].get("rank")
    expected = None if fault.of_all or fault.cause == "healthy" else slow_rank
    if fault.cause == "healthy":
        first = next((one for one in found if one["id"] in ABOUT_RANKS), first)
        is_right = has_run and (first is None or first["id"] not in ABOUT_RANKS)
    else:
        is_right = first is not None and first["id"] == fault.cause and named == expected
    return RankVerdict(
        fault.kind,
        ranks,
        fault.strategy,
        fault.where,
        expected,
        fault.cause,
        named,
        "none" if first is None else first["id"],
        is_right,
        is_busy,
        fault.is_note,
        "" if first is None else first["text"].replace(socket.gethostname(), "node-a"),
        [one["id"] for one in found[1:]],
    )


def summary(verdicts: Sequence[RankVerdict]) -> dict[str, int]:
    """Returns how many runs were judged right."""
    planted = [one for one in verdicts if one.cause != "healthy"]
    healthy = [one for one in verdicts if one.cause == "healthy"]
    return {
        "planted": len(planted),
        "right": sum(one.is_right for one in planted),
        "right_by_a_note": sum(one.is_right for one in planted if one.is_note),
        "healthy": len(healthy),
        "not_accused": sum(one.is_right for one in healthy),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="kinds, separated by commas")
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--where", default="cpu,simulated")
    parser.add_argument("--strategy", default="ddp,fsdp,auto")
    parser.add_argument("--list", action="store_true", help="print the kinds")
    parser.add_argument("--keep", type=Path, help="a new folder for the run folders")
    parser.add_argument("--out", type=Path, help="the record")
    chosen = parser.parse_args()
    only = set(filter(None, chosen.only.split(",")))
    faults = [
        one
        for one in FAULTS
        if (not only or one.kind in only) and one.where in chosen.where and one.strategy in chosen.strategy
    ]
    if chosen.list:
        print("\n".join(f"{one.where:9} {one.strategy:4} {one.kind:22} {one.cause}" for one in faults))
        return
    verdicts: list[RankVerdict] = []
    with contextlib.ExitStack() as stack:
        place = chosen.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rank-faults-")))
        place.mkdir(parents=True, exist_ok=True)
        machine = stack.enter_context(RankMachine(place.resolve()))
        for number, fault in enumerate(faults):
            for ranks in [1] if fault.cards else map(int, chosen.ranks.split(",")):
                if ranks > fault.most_ranks:
                    continue
                slow_rank = 1 if ranks == 2 else number % ranks  # rank 0 is slow in some runs
                verdicts.append(judge(machine, fault, ranks, slow_rank))
                last = verdicts[-1]
                print(
                    f"{'right' if last.is_right else 'WRONG':6} {last.device:9} {last.strategy:4} {last.ranks} ranks "
                    f"{last.fault:22} rank {last.slow_rank}, {last.cause}: found rank {last.named_rank}, "
                    f"{last.named_cause}{' (busy)' if last.is_busy else ''}\n    {last.said}",
                    flush=True,
                )
                if chosen.out is not None:  # after each run, so that the record has those before an interruption
                    _write(verdicts, chosen.out)
    print(_sentence(verdicts))


def _sentence(verdicts: Sequence[RankVerdict]) -> str:
    found = summary(verdicts)
    return (
        f"The right rank and cause were found in {found['right']} of {found['planted']} planted runs, first or, in "
        f"{found['right_by_a_note']}, as the note that it is. "
        f"{found['not_accused']} of {found['healthy']} healthy runs were accused of nothing about ranks."
    )


def _write(verdicts: Sequence[RankVerdict], out: Path | None) -> None:
    from benchmarks.measuring import finish

    config = {"step_ms": STEP_MS, "samples_of_a_rank": BATCH, "card": CARD}
    results = [summary(verdicts), {"runs": [asdict(one) for one in verdicts]}]
    finish("planted_rank_faults", results, _sentence(verdicts), out, config=config)


if __name__ == "__main__":
    main()
