"""Names samples that fail in errors. Failing samples of training are left out up to loader.max_skipped."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from wellfed.data.backends.batch_request import BatchRequest, LostSample
from wellfed.data.settings import LoaderSettings
from wellfed.errors import DataError
from wellfed.record.entries import OnEvent, ignore_event

_LOG = logging.getLogger(__name__)
_OF_CODE = ("TypeError", "NameError", "UnboundLocalError", "AttributeError")
"""Errors that a mistake in the dataset's code raises for each sample, and damaged data at times."""
SHARED = (
    "It loads in the training process: the fault passed, or workers share something that only one process or thread "
    "may use, such as an open file, a connection, or the GPU. Open it where it is first used (if self.file is None: "
    "self.file = open(...)), or set loader.backend=inline loader.num_workers=0."
)
"""Way out for a sample or batch that fails in a worker alone."""


class BadSamples:
    """The samples that failed so far. They are never requested again, in this run or when it is resumed."""

    def __init__(
        self,
        name: str,
        settings: LoaderSettings,
        *,
        purpose: str = "training",
        may_skip: bool = True,
        on_event: OnEvent = ignore_event,
    ) -> None:
        """
        Args:
            name: class of the dataset, for messages.
            purpose: training or evaluation, which leaves nothing out: its metrics would belong to another set.
            may_skip: whether loader.max_skipped is possible (one rank).
            on_event: receives a ``sample_skipped`` for each sample that is left out.
        """
        self._name, self._most, self._skip_ids = name, settings.max_skipped, settings.skip_ids
        self._purpose, self._may_skip, self._on_event = purpose, may_skip, on_event
        self.indices: list[int] = []
        """Indices that are left out, in the order in which they failed."""

    def remember(self, indices: Sequence[int]) -> None:
        """Sets the samples to leave out, from the resumed run or from an earlier position of this one."""
        if new := [index for index in indices if index not in self.indices]:
            _LOG.info("Samples %s are left out: they failed before the run was resumed.", new)
        self.indices = list(indices)

    def leave_out(self, request: BatchRequest) -> BatchRequest:
        """Returns a request without the samples that are known to fail."""
        if not self.indices:
            return request
        left = request.indices[~torch.isin(request.indices, torch.tensor(self.indices))]
        return replace(request, indices=left, total=request.total - len(request.indices) + len(left))

    def take(self, lost: Sequence[LostSample], request: BatchRequest, loads: Callable[[int], bool] | None) -> None:
        """Adds samples that have just failed, each once.

        Args:
            loads: returns whether a sample loads in the training process; None = that builds the batches.

        Raises:
            DataError: more than loader.max_skipped have failed, or the samples are not the cause.
        """
        for one in lost:
            if one.index in self.indices:  # drawn again, in this batch or in one requested before it failed
                continue
            if len(self.indices) >= self._most:
                raise self._too_many(one, request, loads) from one.cause
            self.indices.append(one.index)
            _LOG.warning(
                "%s: training sample %d is left out (epoch %d, batch %d), %d of loader.max_skipped=%d: %s",
                self._name, one.index, request.epoch, request.batch, len(self.indices), self._most, one.reason,
            )  # fmt: skip
            self._on_event(
                "sample_skipped", index=one.index, reason=one.reason, epoch=request.epoch, batch=request.batch
            )

    def none_left(self, request: BatchRequest) -> DataError:
        """Returns the error of a step that has lost all its samples."""
        return DataError(
            f"{self._name}: all samples of {request.place(self._purpose)} are left out, and a step needs one. "
            f"Set {self._skipping(*self.indices)}: then they belong to no step."
        )

    def _too_many(self, last: LostSample, request: BatchRequest, loads: Callable[[int], bool] | None) -> DataError:
        is_training = self._purpose == "training"
        place = f"epoch {request.epoch}, batch {request.batch}" if is_training else f"batch {request.batch}"
        problem = f"{self._name}: {self._purpose} sample {last.index} could not be loaded"
        if loads is not None and loads(last.index):
            return DataError(f"{problem} by a worker ({place}): {last.reason}. {SHARED}")
        way_out = "Repair it or remove it from the set: evaluation leaves nothing out."
        if is_training:
            what = "repair them" if self.indices else "repair it"
            way_out = f"Set {self._skipping(*self.indices, last.index)}, or {what}."
        if last.reason.startswith(_OF_CODE):
            doubt = "Do other samples raise it too? Then mend the code of the dataset. Otherwise"
            way_out = f"{doubt} {way_out[0].lower()}{way_out[1:]}"
        elif is_training and self._may_skip and not self._most:
            way_out += " loader.max_skipped=1 leaves out what fails."
        if self._most:
            way_out = (
                f"Samples {self.indices} failed before, and loader.max_skipped={self._most} allows no more. {way_out}"
            )
        return DataError(f"{problem} ({place}): {last.reason}. {way_out}")

    def _skipping(self, *ids: int) -> str:
        """Returns the override that skips these samples in addition to those already skipped."""
        return f"loader.skip_ids=[{','.join(map(str, (*self._skip_ids, *ids)))}]"
