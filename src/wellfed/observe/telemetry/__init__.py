"""Watches the GPUs and this process while a run lasts, in threads with a clock of their own.

Knows NVML's figures through `wellfed.observe.nvml` and the host's through psutil; knows no torch, Lightning or wandb,
and never holds the training up: what a driver refuses is absent, one that hangs is left alone.
Start from `metrics.METRICS` (what is published) and `sampler.Sampler` (who watches).
"""
