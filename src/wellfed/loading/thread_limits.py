"""Limits the CPUs and threads of each worker, so that many of them use what one was given and no more."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from threadpoolctl import ThreadpoolController

_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


def limit_process(cpus: frozenset[int] | None, num_threads: int) -> None:
    """Let this worker process run on these CPUs, with so many threads in torch and in the BLAS that numpy uses."""
    os.environ.update(dict.fromkeys(_VARIABLES, str(num_threads)))  # for libraries that are loaded later
    if cpus is not None:
        try:
            threads = [int(name) for name in os.listdir("/proc/self/task")]
        except OSError:
            threads = [0]
        for thread in threads:
            os.sched_setaffinity(thread, cpus)
    ThreadpoolController().limit(limits=num_threads)
    torch.set_num_threads(num_threads)


@contextmanager
def one_thread_here() -> Iterator[None]:
    """Torch runs on this thread alone in what this thread calls; the other threads keep their count.

    OpenMP keeps the count for each thread that calls it, and would give each of them a team of its own. Not
    ``torch.set_num_threads``: it sets MKL's count as well, which is that of the process.
    """
    torch.get_num_threads()  # torch sets its own count where a thread first asks, and would undo ours
    with _controller().select(user_api="openmp").limit(limits=1):
        yield


@cache
def _controller() -> ThreadpoolController:
    return ThreadpoolController()
