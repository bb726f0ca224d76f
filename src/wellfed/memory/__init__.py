"""What sits in device memory and how to shrink it: feature tables, micro-batch sizes, out-of-memory errors.

Knows tensors and bytes; knows nothing of Lightning, configuration or loaders.
Start from `features.hold` and `ladder.MicroBatches`.
"""
