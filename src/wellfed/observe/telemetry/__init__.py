"""Watches the GPUs and this process during a run, in threads of its own. Training never waits for them.

GPU figures come from `wellfed.observe.nvml`, host figures from psutil. Imports no torch, Lightning or wandb. A driver
that hangs delays only its own thread.

Start from `metrics.METRICS` (the published figures) and `sampler.Sampler`, which owns threads and sources.
"""
