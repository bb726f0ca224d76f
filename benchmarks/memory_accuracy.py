"""How near is the predicted peak of device memory to the real one? Over models, micro-batches and precisions.

    python benchmarks/memory_accuracy.py [--only NAME] [--out RECORD]

Models: those of `memory_cases.py`, and every workload in configs/workload in each feature mode as its options have it.
Each at four micro-batches, unsplit and in a step of the largest of them, in float32 and in bf16-mixed.

- predicted: `wellfed.plan.predict.rehearsal.measure` on fake tensors, then `predicted_peak`: tensors' bytes, and what
  the allocator reserves for them.
- counted: without a GPU, the same training for real on the CPU, with torch's MemTracker counting live tensors, which
  shares no code with ours. Both run in CUDA's kinds of kernels as far as a CPU has them (see
  `wellfed.plan.predict.cuda_emulation`).
- on a GPU: requested_bytes and max_memory_reserved of the real training there. cuBLAS's workspaces are not predicted. A
  simulated card's reserve of an RNN is a model: models with an RNN are shown and not counted.
  Fused layers of frozen encoders are off, since a simulated card does not see inside them.

On a simulated card (tests/fake_cuda, compiled when first used):

    FAKE_CUDA_DEVICES=1 FAKE_CUDA_MIB=16384 PYTHONPATH=tests/fake_cuda/site python benchmarks/memory_accuracy.py
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.measuring import finish  # noqa: E402
from benchmarks.memory_cases import (  # noqa: E402
    CARDS_ALONE,
    Case,
    cases,
    counted_peak,
    cuda_peak,
    estimated,
    workload_cases,
)
from wellfed.observe.hardware.detect import machine  # noqa: E402
from wellfed.observe.hardware.torch_cuda import torch_cuda  # noqa: E402
from wellfed.observe.machine_facts import SIMULATED  # noqa: E402
from wellfed.plan.predict.peak import NoEstimate, StepShape, predicted_peak  # noqa: E402
from wellfed.units import MIB  # noqa: E402

PRECISIONS = ("32-true", "bf16-mixed")
UNDER_FRAC = 0.01
"""A prediction that is lower by more counts as under-predicted."""


def steps(case: Case) -> Iterator[tuple[int, int]]:
    """Micro-batch and samples of the step: unsplit, and split where there is something to split."""
    for size in case.sizes:
        yield size, size
        if size < max(case.sizes):
            yield size, max(case.sizes)


def compare(case: Case, precision: str) -> Iterator[dict[str, Any]]:
    """A row a micro-batch."""
    case = replace(case, task=replace(case.task, precision=precision))
    began_s = time.perf_counter()
    exact = estimated(case, max(case.sizes), block_bytes=1)
    took_s = time.perf_counter() - began_s
    if isinstance(exact, NoEstimate):
        yield {"model": case.name, "precision": precision, "no_estimate": exact.reason}
        return
    blocks = estimated(case, max(case.sizes))
    assert not isinstance(blocks, NoEstimate)
    for micro_batch, samples in steps(case):
        step = StepShape(samples)
        found, reserved = predicted_peak(exact, micro_batch, step), None
        if torch.cuda.is_available():
            counted, reserved = cuda_peak(case, micro_batch, samples)
        else:
            counted = counted_peak(case, micro_batch, samples)
        row = {
            "model": case.name,
            "precision": precision,
            "micro_batch": micro_batch,
            "samples": samples,
            "moment": found.moment,
            "predicted_mib": found.tensor_bytes / MIB,
            "counted_mib": counted / MIB,
            "error_frac": found.tensor_bytes / counted - 1,
            "estimate_s": took_s,
            "num_points": len(exact.points),
            "has_rnn": any(isinstance(each, torch.nn.RNNBase) for each in case.model.modules()),
        }
        if reserved is not None:
            predicted = predicted_peak(blocks, micro_batch, step).tensor_bytes
            row |= {
                "predicted_reserved_mib": predicted / MIB,
                "reserved_mib": reserved / MIB,
                "reserved_error_frac": predicted / reserved - 1,
                "over_mib": (predicted - reserved) / MIB,
            }
        yield row


def summary(errors: list[float]) -> dict[str, float]:
    """Returns a summary of relative errors."""
    sizes = [abs(error) for error in errors]
    return {
        "n": len(errors),
        "error_frac_median": statistics.median(sizes),
        "error_frac_worst": max(sizes),
        "error_frac_sd": statistics.pstdev(errors),
        "error_frac_lowest": min(errors),
        "error_frac_highest": max(errors),
        "under_predicted_frac": sum(error < -UNDER_FRAC for error in errors) / len(errors),
    }


def show(row: dict[str, Any]) -> None:
    """Prints a line of the table."""
    head = f"{row['model']:28} {row['precision']:10}"
    if "no_estimate" in row:
        print(f"{head} no estimate: {row['no_estimate']}", flush=True)
        return
    print(
        f"{head} {row['micro_batch']:5} of {row['samples']:5}  {row['predicted_mib']:9.2f} MiB predicted "
        f"{row['counted_mib']:9.2f} counted {100 * row['error_frac']:+7.2f} %  {row['moment']}",
        f"  reserved {100 * row['reserved_error_frac']:+.1f} %" if "reserved_error_frac" in row else "",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="models whose name holds this text")
    parser.add_argument(
        "--part", choices=("models", "workloads"), help="those of memory_cases.py, or the workloads alone"
    )
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch.backends.mha.set_fastpath_enabled(False)
    rows: list[dict[str, Any]] = []
    cards = machine(torch_cuda()).training_gpus if torch.cuda.is_available() else ()
    if cards:  # the first product makes cuBLAS's workspaces, which are no tensors of a model
        first = torch.ones(64, 64, device="cuda", requires_grad=True)
        (first @ first).sum().backward()  # type: ignore[no-untyped-call]
    models = () if chosen.part == "workloads" else cases()
    workloads = () if chosen.part == "models" else workload_cases(ROOT / "configs")
    for case in chain(models, workloads):
        if (chosen.only and chosen.only not in case.name) or (
            case.name in CARDS_ALONE and not torch.cuda.is_available()
        ):
            continue
        for precision in PRECISIONS:
            for row in compare(case, precision):
                rows.append(row)
                show(row)
    has_cuda = torch.cuda.is_available()
    is_simulated = has_cuda and torch.cuda.get_device_name().startswith(SIMULATED)
    known = [row for row in rows if "no_estimate" not in row]
    counted = [row for row in known if not (is_simulated and row["has_rnn"])]
    against = "requested_bytes" if has_cuda else "MemTracker on the CPU"
    results = [{"against": against, **summary([row["error_frac"] for row in counted])}]
    if has_cuda:
        errors = [row["reserved_error_frac"] for row in counted]
        results.append({"against": "max_memory_reserved", **summary(errors)})
    times = {(row["model"], row["precision"]): row["estimate_s"] for row in known}
    says = "; ".join(
        f"{each['against']}: {each['n']} peaks, error {100 * each['error_frac_median']:.2f} % in the median and "
        f"{100 * each['error_frac_worst']:.1f} % at worst, {100 * each['under_predicted_frac']:.1f} % of them "
        f"under-predicted by more than {100 * UNDER_FRAC:g} %, the lowest by {100 * each['error_frac_lowest']:.1f} %"
        for each in results
    )
    config = {"precisions": PRECISIONS, "under_frac": UNDER_FRAC, "threads": 1}
    config |= {"only": chosen.only, "part": chosen.part}
    says = (
        f"{'Simulated card. ' if is_simulated else ''}{says}. "
        f"An estimate took {statistics.median(times.values()):.1f} s in the median and "
        f"{max(times.values()):.1f} s at most; {len(rows) - len(known)} had none."
    )
    finish("memory_accuracy", results, says, chosen.out, config=config, is_simulated=is_simulated)


if __name__ == "__main__":
    main()
