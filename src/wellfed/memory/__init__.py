"""What sits in device memory and how to shrink it: feature tables, micro-batch sizes, out-of-memory errors; and what a
run will take, before it is run.

Knows tensors and bytes; knows nothing of Lightning, configuration or loaders.
Start from `features.hold` and `ladder.MicroBatches`; of the estimate from `footprint.predicted_peak`, which needs no
torch, and `estimate.measure`, which makes what it reads.
"""
