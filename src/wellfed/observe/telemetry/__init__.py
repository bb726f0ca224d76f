"""Watches the GPUs and this process while a run lasts, in threads with a clock of their own.

GPU figures come from `wellfed.observe.nvml`, host figures from psutil. It imports no torch, Lightning or wandb.
Training never waits for it: figures that a driver refuses are absent, and a driver that hangs delays its thread alone.
Start from `metrics.METRICS` (the published figures) and `sampler.Sampler`, the one owner of threads and sources.
"""
