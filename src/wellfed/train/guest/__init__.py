"""Trains a LightningModule of the user under Lightning's own Trainer, with its own loops and the user's own loaders.

The engine adds arguments of the Trainer, callbacks and loggers. It calls the user's code by itself in two
places: one look at the loaders before the plan, and one call of the hooks that write to checkpoints.

    arguments    the Trainer's arguments       marks       step clock, times of hooks, progress
    data         where the batches come from   reading     place in an epoch, parts of a batch
    figures      metrics.csv                   saves       checkpoints, limits, signals
    additions    on_nan, gpu.compile           module      a plain model as a LightningModule
    ceiling      steps without loading         users       callbacks that can't be
"""
