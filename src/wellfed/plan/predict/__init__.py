"""Predicts the device memory of a training step, and finds the largest micro-batch that fits.

    forked_estimate -> cache -> estimate: a child process measures once what the cache on disk lacks
    estimate -> rehearsal: steps of some sizes on fake tensors (cuda_emulation, cudnn), which memory_tracker counts
             -> peak: their memory as a function of the micro-batch
    peak -> replay -> caching_allocator: the peak of a run, with what the allocator adds
    size_fit -> size_search: real steps instead, and the sizes to try

Needs no Lightning, configuration or loaders. Start from `peak.predicted_peak`, which needs no torch, and from
`estimate.measure`, which makes the footprint.
"""
