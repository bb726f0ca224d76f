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
    """Yields the batches of a rank's own loader, whose number is unknown before the end.

    At each step the ranks exchange their numbers of samples. A rank without samples gets padding until all ranks are
    done. The position counts steps, so each rank resumes after that number of its own batches.
    """

    def __init__(self, loader: Any, *, drop_last: bool) -> None:
        """
        Args:
            drop_last: whether the epoch ends as soon as one rank has no samples left.
        """
        self._loader, self._drop_last = loader, drop_last
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
        is_over, total_steps = state["stream"]["is_over"], state["stream"]["total"]
        epoch, step = (state["epoch"] + 1, 0) if is_over else (state["epoch"], state["batch"])
        own, latest, is_over = iter(self._loader), None, False
        while not is_over:
            delivery: Delivery | None = next(own, None)
            self.on_own()
            size, goes_on = (0, False) if delivery is None else (delivery.size, not delivery.is_last)
            total, num_going_on = self._summed(size, goes_on)
            if total == 0:
                break  # nothing was left when the run was resumed
            is_over = num_going_on < dist.get_world_size() if self._drop_last else num_going_on == 0
            latest = delivery or latest
            if latest is None and step > 0:  # resumed without samples left; any batch has the shapes
                self._loader.load_state_dict({"epoch": epoch, "batch": 0})
                latest = next(iter(self._loader))
            if latest is None:
                raise DataError(
                    f"Rank {dist.get_rank()} has no sample of epoch {epoch}: the stream has fewer parts with samples "
                    "than there are ranks. Set fewer trainer.devices."
                )
            step, total_steps = step + 1, total_steps + 1
            stream = {**self._loader.state_dict()["stream"], "asked": 0, "left": 0, "states": None, "print": 0}
            stream |= {"is_over": is_over, "total": total_steps}
            self._state = {"epoch": epoch, "batch": step, "stream": stream}
            yield replace(
                latest,
                epoch=epoch,
                index=step - 1,
                total=total,
                is_padding=delivery is None,
                is_last=is_over,
                position=self._state,
                took=None if delivery is None else delivery.took,
                copy_ahead_ms=None if delivery is None else delivery.copy_ahead_ms,
            )
        self.load_state_dict({**self._state, "stream": {**self._state["stream"], "is_over": True}})

    def _summed(self, size: int, goes_on: bool) -> tuple[int, int]:
        """Returns the samples of the step, and the number of ranks with more. Exchanged on the host by gloo."""
        if self._group is None:
            is_of_hosts = dist.get_backend() == "gloo"
            self._group = dist.group.WORLD if is_of_hosts else dist.new_group(backend="gloo")
        sums = torch.tensor([size, int(goes_on)])
        dist.all_reduce(sums, group=self._group)
        total, num_going_on = sums.tolist()
        return total, num_going_on
