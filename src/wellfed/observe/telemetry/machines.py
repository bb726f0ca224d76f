"""Numbers the GPUs and hosts of all machines of a run: those of node 0 as CUDA does, those of others apart from them.

In files and for people a number of another node is ``node1/0``, its host ``node1/-1``.
"""

from __future__ import annotations

import re

HOST = -1
"""Stands for the host where a GPU's number is expected."""
_STRIDE = 1000
"""More than a machine has."""
LABEL = re.compile(rb",node(\d{1,6})/(-?\d{1,3}),")
"""A cell of telemetry.csv that has such a number."""


def of_node(node: int, gpu: int) -> int:
    """The number within the run of a GPU, or of the host, of a node."""
    return node * _STRIDE + gpu


def is_host(number: int) -> bool:
    """Returns whether the number is a host's, of any machine."""
    return (number - HOST) % _STRIDE == 0


def named(number: int) -> int | str:
    """Returns the number as files and screens have it."""
    node, place = divmod(number - HOST, _STRIDE)
    return place + HOST if node == 0 else f"node{node}/{place + HOST}"


def label_of(gpu: dict[str, object]) -> str:
    """The same of an entry of ``machine.gpus`` of the record."""
    index = gpu.get("index", "")
    return f"node{gpu['node']}/{index}" if gpu.get("node") else str(index)


def numbered(text: bytes) -> bytes:
    """Lines of telemetry.csv with the numbers in the place of what is shown."""
    return LABEL.sub(lambda found: b",%d," % of_node(int(found[1]), int(found[2])), text)
