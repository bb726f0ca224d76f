"""The predicted reserve of cuDNN's RNNs beside that of a real card: benchmarks/records/2026-11-26_cudnn_h200.json."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from wellfed.plan.predict.cuda_emulation import AsOnCuda
from wellfed.plan.predict.memory_tracker import MemoryTracker

RECORD = Path(__file__).parents[3] / "benchmarks" / "records" / "2026-11-26_cudnn_h200.json"
ROWS: list[dict[str, Any]] = [row for row in json.loads(RECORD.read_text())["results"] if row["kind"] != "Conv2d"]


def name_of(row: dict[str, Any]) -> str:
    return f"{row['kind']}-{row['dtype']}-{'x'.join(map(str, row['shape']))}{'-drop' if row.get('dropout') else ''}"


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_an_rnn_holds_what_a_real_card_held(row: dict[str, Any]) -> None:
    steps, batch, inputs, size, layers, directions = row["shape"]
    with FakeTensorMode():
        kind = getattr(nn, row["kind"])
        layer = kind(inputs, size, num_layers=layers, bidirectional=directions == 2, dropout=row["dropout"])
        count, x = MemoryTracker(), torch.randn((steps, batch, inputs), requires_grad=True)
        with AsOnCuda(), count, torch.autocast("cpu", torch.bfloat16, enabled=row["dtype"] == "bf16"):
            count.note([*layer.parameters(), x], "before")
            result = layer(x)
            held = sum(count.live.values()) - count.live["before"]
    result[0].sum().backward()
    assert held == row["held"]
