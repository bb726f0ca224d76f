"""What sits in device memory while a run lasts, and how to shrink it: feature tables, out-of-memory errors, the ladder.

Knows tensors and bytes; knows nothing of Lightning, configuration or loaders.
Start from `features.hold` and `ladder.MicroBatches`.
"""
