"""What does it cost to sum gradients after the backward pass, so that all ranks can end a step that one can't do?

    python benchmarks/ddp_overlap.py [--ranks 2] [--rounds 7] [--out RECORD]

memory.on_oom=fail leaves the sums to DDP, which begins with them while the backward pass still computes;
memory.on_oom=retry, the default, has them summed when all ranks have said that their passes went well. Both ways train
copies of one model in the same processes, in turns. Ranks are processes of this machine with a thread each, that talk
by Gloo over its loopback. Gloo's sums take cores themselves: what NCCL hides behind the kernels of a GPU is not seen.
"""

from __future__ import annotations

import argparse
import copy
import functools
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from benchmarks.forked_ranks import on_ranks  # noqa: E402
from benchmarks.measuring import finish  # noqa: E402
from wellfed.batches import Delivery  # noqa: E402
from wellfed.contract import LossOutput  # noqa: E402
from wellfed.train.memory.step_down import Fallbacks, MicroBatches  # noqa: E402
from wellfed.train.step.compiled import Loss  # noqa: E402
from wellfed.train.step.micro_batches import Preparation  # noqa: E402
from wellfed.train.step.precision import Precision  # noqa: E402
from wellfed.train.step.replicas import AgreeingReplicas, Replicas  # noqa: E402
from wellfed.train.step.step_passes import Computation  # noqa: E402
from wellfed.train.step.train_step import StepSettings, TrainStep  # noqa: E402

CPU = torch.device("cpu")
DEPTH, SAMPLES, STEPS = 6, 64, 20
"""Layers, samples of a step on a rank, and steps of a way and round."""
WIDTHS = (64, 256, 1024, 2048)


class Layers(nn.Module):
    """As wide as it is told; the loss is of no use."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(part for _ in range(DEPTH) for part in (nn.Linear(width, width, bias=False), nn.GELU()))
        )

    def loss(self, batch: dict[str, Tensor]) -> LossOutput:
        """The mean square of what comes out."""
        return LossOutput(self.layers(batch["x"]).square().mean())


class Called(nn.Module):
    """What DDP stands around: calls what it is given."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, call: Any, *arguments: Any) -> Any:
        """``call(*arguments)``."""
        return call(*arguments)


def step_of(model: Layers, *, retries: bool) -> TrainStep:
    """As training has it with ``memory.on_oom=retry`` or ``fail``."""
    wrapped = DistributedDataParallel(Called(model))
    ranks = AgreeingReplicas(wrapped, CPU, list(model.parameters())) if retries else Replicas(wrapped, CPU)
    return TrainStep(
        Computation(
            model, Loss(model, "none", print), Preparation(None, 0), Precision("32-true", "cpu"), CPU, ranks=ranks
        ),
        torch.optim.SGD(model.parameters(), lr=1e-3),
        Fallbacks(MicroBatches(SAMPLES)),
        StepSettings(on_oom="retry" if retries else "fail"),
    )


def trained(rank: int, size: int, rounds: int) -> dict[int, dict[str, list[float]]]:
    """On one rank seconds of a step: by width, way and round."""
    found: dict[int, dict[str, list[float]]] = {}
    for width in WIDTHS:
        torch.manual_seed(0)
        model = Layers(width)
        steps = {"fail": step_of(copy.deepcopy(model), retries=False), "retry": step_of(model, retries=True)}
        delivery = Delivery({"x": torch.randn(SAMPLES, width)}, epoch=0, index=0, total=size * SAMPLES)
        taken = found[width] = {name: [] for name in steps}
        for number in range(rounds + 1):
            for name, step in steps.items() if number % 2 else reversed(steps.items()):
                dist.barrier()
                began_s = time.perf_counter()
                for _ in range(STEPS):
                    step(delivery)
                dist.barrier()
                if number:
                    taken[name].append((time.perf_counter() - began_s) / STEPS)
        weights = [torch.cat([each.detach().flatten() for each in step._model.parameters()]) for step in steps.values()]
        assert torch.allclose(*weights, rtol=1e-4, atol=1e-6), "both ways learn the same"  # type: ignore[arg-type]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, help="file of the record")
    asked = parser.parse_args()
    raw: dict[str, dict[str, list[float]]] = on_ranks(functools.partial(trained, rounds=asked.rounds), asked.ranks)
    results = []
    for width, taken in raw.items():
        ratios = [own / ours for own, ours in zip(taken["fail"], taken["retry"], strict=True)]
        row = {"width": int(width), "parameters": DEPTH * int(width) ** 2, "n": len(ratios)}
        row |= {f"{name}_ms_median": 1e3 * statistics.median(values) for name, values in taken.items()}
        row |= {"retry_to_fail_rate_median": statistics.median(ratios)}
        row |= {"retry_to_fail_rate_lowest": min(ratios), "retry_to_fail_rate_highest": max(ratios)}
        results.append(row)
        print({key: round(value, 3) for key, value in row.items()}, flush=True)
    says = "; ".join(f"{row['parameters']:,} parameters: {row['retry_to_fail_rate_median']:.2f}" for row in results)
    says = (
        f"With memory.on_oom=retry steps come at so many times the rate of fail, {asked.ranks} ranks on a CPU: {says}."
    )
    config = {"depth": DEPTH, "samples_a_rank": SAMPLES, "backend": "gloo, loopback"}
    finish("ddp_overlap", results, says, asked.out, config=config)


if __name__ == "__main__":
    main()
