"""What cuDNN holds, as predicted, beside what it held on a real card: benchmarks/records/2026-11-26_cudnn_h200.json."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from wellfed.plan.predict.cuda_emulation import as_on_cuda
from wellfed.plan.predict.cudnn import FEWEST_CHANNELS
from wellfed.plan.predict.memory_tracker import MemoryTracker

RECORD = Path(__file__).parents[3] / "benchmarks" / "records" / "2026-11-26_cudnn_h200.json"
ROWS: list[dict[str, Any]] = json.loads(RECORD.read_text())["results"]
RNNS = [row for row in ROWS if row["kind"] != "Conv2d"]
CONVOLUTIONS = [
    row for row in ROWS if row["kind"] == "Conv2d" and row["dtype"] != "fp32" and row["shape"][2] >= FEWEST_CHANNELS
]


def name_of(row: dict[str, Any]) -> str:
    return f"{row['kind']}-{row['dtype']}-{'x'.join(map(str, row['shape']))}{'-drop' if row.get('dropout') else ''}"


def made(row: dict[str, Any]) -> tuple[nn.Module, tuple[int, ...]]:
    """The layer and the shape of its input."""
    if row["kind"] == "Conv2d":
        batch, before, after, kernel, size, stride = row["shape"]
        return nn.Conv2d(before, after, kernel, stride=stride, padding=kernel // 2), (batch, before, size, size)
    steps, batch, inputs, size, layers, directions = row["shape"]
    kind = getattr(nn, row["kind"])
    layer = kind(inputs, size, num_layers=layers, bidirectional=directions == 2, dropout=row["dropout"])
    return layer, (steps, batch, inputs)


def predicted(layer: nn.Module, shape: tuple[int, ...], dtype: str) -> dict[str, int]:
    """The same figures as a row's, counted on fake tensors."""
    count = MemoryTracker(cudnn_workspaces=True)
    x = torch.randn(shape, requires_grad=True)
    with as_on_cuda(), count, torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
        count.note([*layer.parameters(), x], "before")
        result = layer(x)
        output = result[0] if isinstance(result, tuple) else result
        held = sum(count.live.values()) - count.live["before"]
        found = {"held": held, "forward_peak": sum(count.peak.values()) - count.live["before"]}
        gradient = torch.ones_like(output)
        before = sum(count.live.values())
        count.forget_peak()
        with torch.autocast("cpu", enabled=False):
            output.backward(gradient)
        found["backward_peak"] = sum(count.peak.values()) - before
    return found


@pytest.mark.parametrize("row", RNNS, ids=name_of)
def test_an_rnn_holds_what_a_real_card_held(row: dict[str, Any]) -> None:
    with FakeTensorMode():
        found = predicted(*made(row), row["dtype"])
    assert found["held"] == row["held"]
    for moment in ("forward_peak", "backward_peak"):
        assert 0.97 <= found[moment] / row[moment] <= 1.1, moment


@pytest.mark.parametrize("row", CONVOLUTIONS, ids=name_of)
def test_a_convolution_uses_what_it_used_on_a_real_card(row: dict[str, Any]) -> None:
    with FakeTensorMode():
        found = predicted(*made(row), row["dtype"])
    assert found["held"] == row["held"]
    assert 0.82 <= found["forward_peak"] / row["forward_peak"] <= 1.08
    assert 0.93 <= found["backward_peak"] / row["backward_peak"] <= 1.2


@pytest.mark.parametrize("options", [{"padding": "valid"}, {"padding": "same"}, {"stride": (1,)}, {"dilation": 2}])
def test_a_convolution_is_followed_however_its_options_are_written(options: dict[str, Any]) -> None:
    with FakeTensorMode():
        found = predicted(nn.Conv2d(3, 32, 3, **options), (2, 3, 16, 16), "bf16")
    assert found["forward_peak"] > found["held"]
