"""Reads the CPUs this process was given, before any library can narrow them.

An OpenMP runtime that is told to bind its threads (OMP_PROC_BIND, KMP_AFFINITY) ties the thread that loads it to one
CPU, and whatever that thread starts inherits this. The commands import this module before torch.
"""

from __future__ import annotations

import os

AT_START: frozenset[int] | None = frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
"""None where the system tells none (macOS, Windows)."""
