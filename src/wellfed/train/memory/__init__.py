"""Spends device memory while a run lasts, and less where it runs out: feature tables, errors of memory, fallbacks.

Keeps on disk what had to be lowered, for the next run.

Knows tensors and bytes; knows nothing of Lightning, configuration or loaders.
Start from `features.hold` and `fallbacks.Fallbacks`.
"""
