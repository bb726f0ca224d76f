"""Gives all ranks that share a stream the same number of steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from wellfed.batches import Delivery
from wellfed.errors import DataError


class StepsOfRanks:
    """Yields the batches of a rank's own loader, until one of the ranks has no other batch.

    At each step the ranks exchange their numbers of samples. The position counts steps, so each rank resumes after that
    number of its own batches.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._state: dict[str, Any] = loader.state_dict()
        self._group: Any = None
        self.on_own: Callable[[], None] = lambda: None
        """Function called once this rank's own batch is there, before it waits for other ranks."""

    def __len__(self) -> int:
        return len(self._loader)

    def state_dict(self) -> dict[str, Any]:
        """Returns the position of the next step."""
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a position."""
        self._loader.load_state_dict(state)
        self._state = self._loader.state_dict()

    def keep_pace(self) -> None:
        """Waits until the device has a free slot for the next batch, if the loader is a prefetcher."""
        getattr(self._loader, "keep_pace", lambda: None)()

    def __iter__(self) -> Iterator[Delivery]:
        state = self._loader.state_dict()
        epoch, step = (state["epoch"] + 1, 0) if state["stream"]["is_over"] else (state["epoch"], state["batch"])
        own, is_over = iter(self._loader), False
        while not is_over:
            delivery: Delivery | None = next(own, None)
            self.on_own()
            goes_on = delivery is not None and not delivery.is_last
            total, num_there, num_going_on = self._summed(
                0 if delivery is None else delivery.size, delivery is not None, goes_on
            )
            if delivery is None or num_there < dist.get_world_size():
                if step == 0:
                    raise DataError(
                        f"A rank has no sample of epoch {epoch}: the stream has fewer parts with samples than there "
                        "are ranks. Set fewer trainer.devices."
                    )
                break  # nothing was left when the run was resumed
            is_over, step = num_going_on < dist.get_world_size(), step + 1
            stream = {**self._loader.state_dict()["stream"], "states": None, "is_over": is_over}
            self._state = {"epoch": epoch, "batch": step, "stream": stream}
            yield replace(delivery, epoch=epoch, index=step - 1, total=total, is_last=is_over, position=self._state)
        self.load_state_dict({**self._state, "stream": {**self._state["stream"], "is_over": True}})

    def _summed(self, *figures: int) -> list[int]:
        """Returns the sums of the figures over all ranks. Exchanged on the host by gloo."""
        if self._group is None:
            is_of_hosts = dist.get_backend() == "gloo"
            self._group = dist.group.WORLD if is_of_hosts else dist.new_group(backend="gloo")
        sums = torch.tensor([int(figure) for figure in figures])
        dist.all_reduce(sums, group=self._group)
        found: list[int] = sums.tolist()
        return found
