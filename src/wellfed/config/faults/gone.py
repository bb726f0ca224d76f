"""Knobs that earlier states of the project had, with what to do instead."""

from __future__ import annotations

from collections.abc import Mapping

GONE: Mapping[str, str] = {}
"""Dotted knob, or an option as ``group=option`` -> what to do instead, as one sentence without a full stop."""


def what_instead(name: str) -> str:
    """Returns the message about a knob or option that is gone; empty if there never was one."""
    return f"{name} went in 0.1: {GONE[name]}." if name in GONE else ""
