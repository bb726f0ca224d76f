"""Watches GPUs and host outside of a run of wellfed: for the monitor, and for people's own training loops.

Knows telemetry, NVML and how a curve is judged; knows nothing of plans, configurations or Lightning.
Start from `monitor.Monitor`; for a loop of your own: ``from wellfed import GPUWatch``.
"""
