"""Trains a LightningModule of the user under Lightning's own Trainer, with its own loops and the user's own loaders.

The engine adds arguments of the Trainer, callbacks and loggers. It calls the user's code by itself in two
places: one look at the loaders before the plan, and one call of the hooks that write to checkpoints.

    arguments    the Trainer's arguments       marks       step clock, times of hooks, gpu.compile
    data         where the batches come from   reading     place in an epoch
    figures      metrics.csv                   saves       checkpoints, limits, signals
    ceiling      steps without loading         module      a plain model as a LightningModule
    users        callbacks that can't be
"""
