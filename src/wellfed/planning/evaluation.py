"""How many producers build the batches of an evaluation: as many as those of training, where the host has room for
what both keep ready. A validation comes in the midst of an epoch, when the batches of training are ready too."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from wellfed.config.schema import RunConfig
from wellfed.hardware.facts import MachineFacts
from wellfed.loading.first_batches import FirstBatches
from wellfed.planning.host_room import room_for
from wellfed.planning.planned import DataFacts, Planned
from wellfed.units import show_bytes


def plan_eval_workers(
    config: RunConfig,
    facts: MachineFacts,
    *,
    knobs: Mapping[str, Planned],
    data: DataFacts,
    warnings: list[str],
    first: FirstBatches | None,
) -> int:
    """Producers of an evaluation on each device; 0 = the training process builds them.

    Their batches have ``memory.micro_batch`` samples, taken to be as large as those of training.
    """
    num_workers: int = knobs["loader.num_workers"].value
    if first is None or not num_workers or not data.num_eval:
        return num_workers
    has_processes = knobs["loader.backend"].value != "threads"
    train = room_for(
        facts,
        first,
        has_processes=has_processes,
        num_workers=num_workers,
        prefetch_factor=knobs["loader.prefetch_factor"].value,
        devices=config.trainer.devices,
    )
    micro: int = knobs["memory.micro_batch"].value
    of_a_step = math.ceil(config.workload.effective_batch_size / config.trainer.devices)
    both = replace(
        train,
        batch_bytes=math.ceil(first.batch_bytes * micro / of_a_step),
        num_batches=math.ceil(data.num_eval / micro),
        free_bytes=train.free_bytes - train.needed_bytes,
    )
    if both.most_workers < num_workers:
        warnings.append(
            f"loader.num_workers={num_workers}: an evaluation has {both.most_workers or 'none'} of them, since "
            f"{train.where} has no room for more beside the batches kept ready for training "
            f"({show_bytes(train.needed_bytes)})."
        )
    return both.most_workers
