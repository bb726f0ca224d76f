"""What a training step will need of device memory, found before it is run, and the largest micro-batch that fits.

Knows tensors and bytes; knows nothing of Lightning, configuration or loaders.
Start from `footprint.predicted_peak`, which needs no torch, and `estimate.measure`, which makes what it reads.
"""
