"""From a dataset to the batches of optimizer steps, as a function of position (seed, epoch, batch).

Knows datasets, ranks, backends and where training stands; knows nothing of Lightning, models or planning.
Start from `build.train_loader` and `position.EpochOrder`.
"""
