"""Numbers the GPUs and hosts of all machines of a run. GPUs of node 0 keep the numbers that CUDA gives them.

Files and reports show a GPU of another node as ``node1/0``, and its host as ``node1/-1``.
"""

from __future__ import annotations

import re
from functools import cache

HOST = -1
"""Number of the host among the GPUs."""
_STRIDE = 1000
"""Distance between the numbers of two nodes, larger than the GPUs of a machine."""
LABEL = re.compile(rb",node(\d{1,6})/(-?\d{1,3}),")
"""A cell of telemetry.csv with a number of another node."""


def of_node(node: int, gpu: int) -> int:
    """Returns the number, within the run, of a GPU or the host of a node."""
    return node * _STRIDE + gpu


def is_host(number: int) -> bool:
    """Returns whether a number is the host's, of any node."""
    return (number - HOST) % _STRIDE == 0


@cache
def named(number: int) -> int | str:
    """Returns a number as files and reports show it."""
    node, index = divmod(number - HOST, _STRIDE)
    return index + HOST if node == 0 else f"node{node}/{index + HOST}"


def label_of(gpu: dict[str, object]) -> str:
    """Returns the same for an entry of ``machine.gpus`` of the record."""
    index = gpu.get("index", "")
    return f"node{gpu['node']}/{index}" if gpu.get("node") else str(index)


def numbered(text: bytes) -> bytes:
    """Returns lines of telemetry.csv with labels of `named` replaced by numbers."""
    return LABEL.sub(lambda found: b",%d," % of_node(int(found[1]), int(found[2])), text)
