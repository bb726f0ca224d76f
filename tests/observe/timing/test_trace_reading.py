"""A trace is read event by event, and one that is none or is cut off says so."""

import json
import os
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from wellfed.observe.timing import trace_figures
from wellfed.observe.timing.trace_figures import Span, spans

KERNEL = {
    "ph": "X",
    "cat": "kernel",
    "name": "ampere_sgemm_128x64_tn",
    "pid": 0,
    "tid": 7,
    "ts": 4521564498025.125,
    "dur": 20.5,
    "args": {"External id": 12, "device": 0, "context": 1, "stream": 7, "correlation": 403, "grid": [8, 1, 1]},
}


def write(path: Path, events: list[object], indent: int | None = 2) -> Path:
    head = {"schemaVersion": 1, "deviceProperties": [], "traceEvents": events, "traceName": str(path)}
    path.write_text(json.dumps(head, indent=indent))
    return path


def test_what_took_time_is_read_and_the_rest_left(tmp_path: Path) -> None:
    meta = {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "python"}}
    flow = {"ph": "s", "id": 403, "pid": 1, "tid": 1, "ts": 4.0, "cat": "ac2g", "name": "ac2g"}
    instant = {"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": 5.0}
    bare = {"ph": "X", "name": "PyTorch Profiler (0)", "pid": "Spans", "tid": "PyTorch Profiler", "ts": 1, "dur": 9}
    found = list(spans(write(tmp_path / "t.json", [meta, KERNEL, flow, instant, bare])))
    start = 4521564498025.125
    assert found == [
        Span("kernel", "ampere_sgemm_128x64_tn", start, start + 20.5, (0, 7), 403, 12),
        Span("", "PyTorch Profiler (0)", 1, 10, ("Spans", "PyTorch Profiler"), None, None),
    ]


@pytest.mark.parametrize("chunk", [200, 333, 2**20])
@pytest.mark.parametrize("indent", [None, 2])
def test_it_does_not_matter_where_a_chunk_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int, indent: int | None
) -> None:
    path = write(
        tmp_path / "t.json", [{**KERNEL, "ts": number, "name": 'a "}, {\n' * 3} for number in range(50)], indent
    )
    monkeypatch.setattr(trace_figures, "_CHUNK", chunk)
    assert [one.start_us for one in spans(path)] == list(range(50))


@pytest.mark.parametrize("text", ["", "no trace", "[]", '{"events": []}'])
def test_what_is_no_trace_says_so(tmp_path: Path, text: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"t\.json is no trace: it does not begin with traceEvents"):
        list(spans(path))


@pytest.mark.parametrize("kept_frac", [0.5, 0.95])
def test_one_that_is_cut_off_gives_what_is_there_and_says_so(tmp_path: Path, kept_frac: float) -> None:
    path = write(tmp_path / "t.json", [KERNEL] * 20)
    text = path.read_text()
    path.write_text(text[: int(kept_frac * len(text))])
    found: list[Span] = []
    with pytest.raises(ValueError, match=r"t\.json is no whole trace"):
        found.extend(spans(path))
    assert 0 < len(found) < 20


def test_a_trace_of_torch_is_read_whole(tmp_path: Path) -> None:
    found = traced(tmp_path, "named by me, }]{")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert found == Counter(
        (one["cat"], one["name"]) for one in events if one.get("cat") in ("cpu_op", "user_annotation")
    )
    assert found["cpu_op", "aten::mm"] == 1
    assert found["user_annotation", "named by me, }]{"] == 1


def test_a_name_that_kineto_does_not_escape_costs_no_more_than_itself(tmp_path: Path) -> None:
    found = traced(tmp_path, 'named "by me"\n')
    assert sum(number for (kind, _), number in found.items() if kind == "user_annotation") <= 1
    del found["user_annotation", 'named "by me"\n']
    assert found == traced(tmp_path, None)


def traced(folder: Path, name: str | None) -> Counter[tuple[str, str]]:
    """Kinds and names of what torch records of a product, within a range of that name."""
    profiler = profile(activities=[ProfilerActivity.CPU])
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profiler, nullcontext() if name is None else record_function(name):
        torch.randn(4, 4) @ torch.randn(4, 4)
    profiler.export_chrome_trace(str(folder / "t.json"))
    return Counter((one.kind, one.name) for one in spans(folder / "t.json") if one.kind != "Trace")
