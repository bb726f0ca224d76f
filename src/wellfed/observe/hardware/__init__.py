"""Finds out what the machine is, and derives from it the memory budget, profile and precision.

Covers cards, CPU quota (cgroup, affinity), RAM and /dev/shm. Callers pass plain values instead of a configuration.
torch is imported only inside ``torch_cuda.torch_cuda()``. ``facts`` and ``profiles`` are pure, so they also work on
facts recorded on another machine.

Start from ``detect.machine`` and ``profiles.resolve_budget``.
"""
