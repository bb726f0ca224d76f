"""Predicts what a training step will need of device memory, and finds the largest micro-batch that fits.

    estimate -> rehearsal: steps on fake tensors (cuda_emulation) of some sizes; memory_tracker counts
             -> footprint: what they took, as functions of the micro-batch; cached on disk (cache)
    footprint.predicted_peak, largest_micro_batch: arithmetic; what the allocator adds by replay (caching_allocator)
    size_fit: real steps instead, of the sizes that size_search chooses

Knows tensors and bytes; knows nothing of Lightning, configuration or loaders.
Start from `footprint.predicted_peak`, which needs no torch, and `estimate.measure`, which makes what it reads.
"""
