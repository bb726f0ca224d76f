"""Finds out what the machine is, and what follows from it: memory budget, profile and precision.

Knows cards, the CPU quota (cgroup, affinity), RAM and /dev/shm. It must not know the configuration (callers pass plain
values) and imports torch only inside ``torch_cuda.torch_cuda()``, which is called only by who wants torch's view.
``facts`` and ``profiles`` are pure: they run on facts recorded on another machine.

Start from ``detect.machine`` and ``profiles.resolve_budget``.
"""
