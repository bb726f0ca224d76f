"""Spends device memory while a run lasts, and spends less: feature tables, out-of-memory errors, the ladder; keeps what
had to be lowered for the next run.

Knows tensors and bytes; knows nothing of Lightning, configuration or loaders.
Start from `features.hold` and `ladder.MicroBatches`.
"""
