"""Makes one optimizer step, without Lightning: micro-batches and weights, forward, backward, clipping, retry.

Knows torch and the workload contract; knows nothing of Lightning, plans, configuration or loaders.
Start from `train_step.TrainStep`, which training, `fit`, the probe before training and the rehearsal of memory all run.
"""
