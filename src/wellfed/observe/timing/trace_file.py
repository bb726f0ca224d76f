"""Reads the events of a trace that torch's profiler wrote, one after the other: such files may have hundreds of MB."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, TextIO

_CHUNK = 2**20
_BEGINS = re.compile(r'"traceEvents"\s*:\s*\[')
_EVENT = re.compile(r'\{\s*"ph"')
_BETWEEN = re.compile(r"[\s,]*")


class Span(NamedTuple):
    """Something that took time, on a thread of the host or on a stream of a device."""

    kind: str
    """``cat`` of the trace: ``cpu_op``, ``user_annotation``, ``cuda_runtime``, ``cuda_driver``, ``kernel``,
    ``gpu_memcpy``, ``gpu_memset``, ..."""
    name: str
    start_us: float
    end_us: float
    lane: tuple[Any, Any]
    """Process and thread of the host, or device and stream."""
    correlation: int | None = None
    """The same of a call to CUDA and of what it launched."""
    operation: int | None = None
    """The same of an operation of torch and of all that was launched for it, ``External id`` of the trace."""


def spans(path: Path) -> Iterator[Span]:
    """All that took time, in the order of the file; what can't be read between two events is left out.

    Raises:
        OSError: it can't be read.
        ValueError: it is no trace, or not a whole one.
    """
    with path.open(encoding="utf-8", errors="replace") as stream:
        for event in _events(stream, path):
            if isinstance(event, dict) and event.get("ph") == "X" and "dur" in event:
                yield _span(event)


def _span(event: dict[str, Any]) -> Span:
    facts, start_us = event.get("args", {}), float(event["ts"])
    return Span(
        kind=str(event.get("cat", "")),
        name=str(event.get("name", "")),
        start_us=start_us,
        end_us=start_us + float(event["dur"]),
        lane=(event.get("pid"), event.get("tid")),
        correlation=facts.get("correlation"),
        operation=facts.get("External id"),
    )


def _events(stream: TextIO, path: Path) -> Iterator[Any]:
    """The list ``traceEvents``, of which no more than a chunk is held."""
    decode = json.JSONDecoder(strict=False).raw_decode
    text = stream.read(_CHUNK)
    begins = _BEGINS.search(text)
    if begins is None:
        raise ValueError(f"{path} is no trace: it does not begin with traceEvents.")
    place = begins.end()
    while True:
        place = _BETWEEN.match(text, place).end()  # type: ignore[union-attr]  # it matches nothing, too
        if text.startswith("]", place):
            return
        try:
            event, place = decode(text, place)
        except json.JSONDecodeError as cause:
            following = _EVENT.search(text, place + 1)
            if following is not None:  # a name with a quotation mark, which kineto does not escape
                place = following.start()
                continue
            more = stream.read(_CHUNK)
            if not more:
                raise ValueError(f"{path} is no whole trace: {cause}") from cause
            text, place = text[place:] + more, 0
            continue
        yield event
