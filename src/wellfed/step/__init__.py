"""One optimizer step, without Lightning: micro-batches and their weights, forward, backward, clipping.

Knows torch and the workload contract; knows nothing of Lightning, plans, configuration or loaders.
Start from ``micro_batches``.
"""
