"""Turns a dataset into the batches of optimizer steps, each a function of its position (seed, epoch, batch).

Knows datasets, ranks, backends and where training stands; knows nothing of Lightning, models or planning.
Start from `train_loader.train_loader`, `epoch_order.EpochOrder` and `settings.LoaderSettings`. A batch's way::

    EpochOrder      which samples: the indices of each step, for this rank
        | BatchRequest (epoch, batch, indices)
    BatchSource     where it is built: this process, threads, or worker processes
        | one request at a time
    BatchBuilder    dataset.fetch(indices), or dataset[index] and collate; names samples that fail
        | BuiltBatch, through a queue where workers build ahead
    TrainLoader     puts batches in order, leaves out bad samples, knows the position to resume from
        | Delivery (batch, epoch, number, samples)
    DevicePrefetcher    copies the next batches to the device while a step runs
        | Delivery, on the device
    the step

A stream has no indices: `stream_loader.StreamLoader` asks its parts for their next batch in turn, `StreamBuilder` reads
them in the place of BatchBuilder, and `stream.Stream` says how it can be shared.
`loader_parts` takes a DataLoader of the user's apart; `sampled_epochs` asks its sampler for the indices of an epoch.
`heartbeats` and `bad_samples` say which sample hangs, kills or raises, and leave it out.
`backend_benchmark` times the first batches, `longest_batch` finds the one that needs the most memory.
"""
