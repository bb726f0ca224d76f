"""What do cuDNN's RNNs and convolutions hold on a GPU beside the tensors that a program sees? Bytes, call by call.

    python benchmarks/cudnn_workspaces.py --out benchmarks/records/<date>_cudnn_<card>.json

`wellfed.plan.predict.cudnn` is fitted to these rows; its tests read the record. A row has what torch's allocator was
asked for: ``held`` after the forward pass, and the peaks of the forward and the backward pass.
"""

from __future__ import annotations

import argparse
import gc
from pathlib import Path
from typing import Any

import torch
from measuring import finish
from torch import Tensor, nn

ROOT = Path(__file__).parents[1]
SHAPES = [
    *((32, 64, 16, 64, 1, 1), (32, 512, 16, 64, 1, 1), (64, 512, 16, 64, 1, 1), (32, 512, 16, 128, 1, 1)),
    *((32, 512, 16, 64, 2, 1), (32, 512, 16, 64, 3, 1), (32, 512, 16, 64, 1, 2), (32, 512, 16, 64, 2, 2)),
    *((90, 512, 8, 256, 3, 1), (100, 256, 64, 512, 2, 1), (32, 512, 128, 64, 1, 1)),
]
"""Time steps, samples, values of an input, values of a state, layers, directions."""
IMAGES = [
    *((64, 64, 64, 3, 56, 1), (64, 128, 128, 3, 28, 1), (64, 256, 256, 3, 14, 1), (64, 3, 64, 7, 224, 2)),
    *((64, 256, 64, 1, 56, 1), (16, 32, 32, 3, 256, 1), (64, 3, 8, 3, 48, 2)),
]
"""Samples, channels before and after, size of the kernel, height and width, stride."""


def asked_for(moment: str) -> int:
    """Bytes that tensors have asked for: ``current`` or ``peak``."""
    return int(torch.cuda.memory_stats()[f"requested_bytes.all.{moment}"])


def passes(layer: nn.Module, x: Tensor, dtype: str) -> dict[str, int]:
    """Bytes of a forward and a backward pass, the second time."""
    found: dict[str, int] = {}
    for _ in range(2):
        layer.zero_grad()
        x.grad = None
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        before = asked_for("current")
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=dtype == "bf16"):
            result = layer(x)
        torch.cuda.synchronize()
        output = result[0] if isinstance(result, tuple) else result
        states = result[1] if isinstance(result, tuple) else ()
        found = {"held": asked_for("current") - before, "forward_peak": asked_for("peak") - before}
        gradient = torch.ones_like(output)
        torch.cuda.reset_peak_memory_stats()
        before = asked_for("current")
        output.backward(gradient)  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        found["backward_peak"] = asked_for("peak") - before
        found["output"] = output.nbytes
        found["states"] = sum(each.nbytes for each in (states if isinstance(states, tuple) else (states,)))
        del result, output, states, gradient
    return found | {"weights": sum(each.nbytes for each in layer.parameters())}


def rnn(kind: str, shape: tuple[int, ...], dtype: str, dropout: float = 0.0) -> dict[str, Any]:
    """A row of an RNN."""
    steps, batch, inputs, size, layers, directions = shape
    made = getattr(nn, kind)(inputs, size, num_layers=layers, bidirectional=directions == 2, dropout=dropout)
    x = torch.randn(steps, batch, inputs, device="cuda", requires_grad=True)
    return {"kind": kind, "dtype": dtype, "shape": shape, "dropout": dropout} | passes(made.cuda(), x, dtype)


def conv(shape: tuple[int, ...], dtype: str) -> dict[str, Any]:
    """A row of a convolution."""
    batch, before, after, kernel, size, stride = shape
    torch.backends.cudnn.allow_tf32 = dtype == "tf32"
    made = nn.Conv2d(before, after, kernel, stride=stride, padding=kernel // 2)
    x = torch.randn(batch, before, size, size, device="cuda", requires_grad=True)
    return {"kind": "Conv2d", "dtype": dtype, "shape": shape} | passes(made.cuda(), x, dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    first = torch.ones(64, 64, device="cuda", requires_grad=True)
    (first @ first).sum().backward()  # type: ignore[no-untyped-call]
    rows = [
        rnn(kind, shape, dtype) for kind in ("LSTM", "GRU", "RNN") for dtype in ("fp32", "bf16") for shape in SHAPES
    ]
    rows += [rnn(kind, SHAPES[4], "fp32", dropout=0.2) for kind in ("LSTM", "GRU", "RNN")]
    rows += [conv(shape, dtype) for dtype in ("fp32", "tf32", "bf16") for shape in IMAGES]
    config = {"cudnn": torch.backends.cudnn.version(), "unit": "bytes"}
    finish("cudnn", rows, f"{len(rows)} calls on {torch.cuda.get_device_name()}.", chosen.out, config=config)


if __name__ == "__main__":
    main()
