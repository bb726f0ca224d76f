"""Turns a dataset into the batches of optimizer steps, each a function of its position (seed, epoch, batch).

Uses no Lightning, no model and no plan. Start from `train_loader.train_loader`, `epoch_order.EpochOrder` and
`settings.LoaderSettings`. The path of a batch::

    EpochOrder        selects the indices of each step for this rank
        | BatchRequest (epoch, batch, indices, total)
    BatchSource       requests batches from this process, threads, or worker processes; leaves out bad samples
        | BatchRequest, without those
    BatchBuilder      calls dataset.fetch(indices), or dataset[index] and collate; names samples that fail
        | BuiltBatch, through a queue if workers build ahead
    BatchSource       puts batches in order
        | Delivery (batch, epoch, number, samples)
    TrainLoader       keeps the position to resume from
        | Delivery
    DevicePrefetcher  copies the next batches to the device while a step runs
        | Delivery, on the device
    the step

A loader that a user hands over takes another path: `own_loader.OwnLoader` reads it as it came and yields deliveries.
`reading_state` saves what its draws depend on, `remade_loader` makes a DataLoader again with a few arguments changed,
`rank_batches` shares its batches out to ranks.

`shards/` reads samples from tar files, `prepared` caches files made from a user's data. `eval_loader` yields validation
and test splits. `backend_benchmark` times the first batches, `non_finite_samples` finds NaN.
"""
