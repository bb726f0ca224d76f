"""Spends device memory while a run lasts, and spends less: feature tables, out-of-memory errors, the ladder.

Knows tensors and bytes; knows nothing of Lightning, configuration or loaders.
Start from `features.hold` and `ladder.MicroBatches`.
"""
