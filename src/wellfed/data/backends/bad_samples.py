"""Finds the samples that make a batch fail, and names them in an error or leaves them out, up to loader.max_skipped."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from wellfed.data.backends.batch_request import BatchRequest, LostSample
from wellfed.data.settings import LoaderSettings
from wellfed.errors import DataError, ErrorKind, WellfedError
from wellfed.record import OnEvent, ignore_event

_LOG = logging.getLogger(__name__)
Failure = TypeVar("Failure")
_LISTED = 20
"""Most indices that a way out spells out."""
_FORKED = "Cannot re-initialize CUDA in forked subprocess"
"""What torch says of any use of CUDA in a process that was forked from one that has used it."""


class WorkerLost(WellfedError):
    """A worker process died, and no sample is known to be at fault."""

    kind: ErrorKind = "worker"


class BadSamples:
    """The samples that failed so far. What failed once is never asked for again, in this run or when it is resumed."""

    def __init__(
        self, name: str, settings: LoaderSettings, *, on_event: OnEvent = ignore_event, may_skip: bool = True
    ) -> None:
        """
        Args:
            name: of the data set, for messages.
            on_event: gets a ``sample_skipped`` for each sample that is left out.
            may_skip: loader.max_skipped would help (one rank).
        """
        self._name, self._most, self._skip_ids = name, settings.max_skipped, settings.skip_ids
        self._may_skip, self._on_event = may_skip, on_event
        self._reasons: dict[int, str] = {}
        self._bad = torch.empty(0, dtype=torch.int64)

    @property
    def indices(self) -> list[int]:
        """What is left out, in the order it failed."""
        return list(self._reasons)

    def remember(self, indices: Sequence[int]) -> None:
        """Leave these out from here on, and no others: those of a run that is resumed."""
        self._reasons = dict.fromkeys(indices, "failed before the run was resumed")
        self._bad = torch.tensor(self.indices, dtype=torch.int64)
        if self._reasons:
            _LOG.info("Samples %s are left out: they failed before the run was resumed.", self.indices)

    def leave_out(self, indices: Tensor) -> Tensor:
        """The indices without those that are known to fail."""
        return indices[~torch.isin(indices, self._bad)] if self._reasons else indices

    def take(self, lost: Sequence[LostSample], epoch: int, batch: int) -> None:
        """Samples that failed just now; a DataError where they are too many, or not at fault themselves."""
        for one in lost:
            if _FORKED in one.reason:
                raise _cuda_in_worker(self._name) from one.cause
            if len(self._reasons) >= self._most:
                raise self._too_many(one, epoch, batch) from one.cause
            self._reasons[one.index] = one.reason
            self._bad = torch.tensor(self.indices, dtype=torch.int64)
            _LOG.warning(
                "%s: training sample %d is left out (epoch %d, batch %d), %d of loader.max_skipped=%d: %s",
                self._name, one.index, epoch, batch, len(self._reasons), self._most, one.reason,
            )  # fmt: skip
            self._on_event("sample_skipped", index=one.index, reason=one.reason, epoch=epoch, batch=batch)

    def none_left(self, epoch: int, batch: int) -> DataError:
        """The error of a step that has lost all its samples."""
        return DataError(
            f"{self._name}: all samples of training batch {batch} of epoch {epoch} are left out, and a step needs one. "
            f"Set {self._skipping(self.indices)}: then they belong to no step."
        )

    def _too_many(self, last: LostSample, epoch: int, batch: int) -> DataError:
        place = f"(epoch {epoch}, batch {batch}): {last.reason}"
        ids = [*self.indices, last.index]
        out = f"Set {self._skipping(ids)}, or repair {'it' if len(ids) == 1 else 'them'}."
        if self._most == 0:
            more = f" loader.max_skipped={len(ids)} leaves out what fails." if self._may_skip else ""
            return DataError(f"{self._name}: training sample {last.index} could not be loaded {place}. {out}{more}")
        before = "; ".join(f"{index}: {reason}" for index, reason in self._reasons.items())
        return DataError(
            f"{self._name}: {len(ids)} training samples could not be loaded, and loader.max_skipped={self._most} "
            f"allows no more. Before: {before}. Now {last.index} {place}. {out}"
        )

    def _skipping(self, ids: Sequence[int]) -> str:
        """As something to type; what is set already stays set."""
        together = [*self._skip_ids, *ids]
        if len(together) > _LISTED:
            return f"loader.skip_ids to what it is, and {','.join(map(str, ids[-_LISTED:]))}"
        return f"loader.skip_ids=[{','.join(map(str, together))}]"


def evaluation_error(name: str, lost: LostSample, batch: int) -> DataError:
    """The error of an evaluation, which can't leave out a sample: its figures would be of another set."""
    if _FORKED in lost.reason:
        return _cuda_in_worker(name)
    return DataError(
        f"{name}: evaluation sample {lost.index} could not be loaded (batch {batch}): {lost.reason}. "
        "Repair it or remove it from the set: evaluation leaves nothing out."
    )


def _cuda_in_worker(name: str) -> DataError:
    """No sample's fault."""
    return DataError(
        f"{name}: uses CUDA in a worker process, where it can't be used ({_FORKED}). "
        "Keep its tensors on the CPU: the engine moves batches, and on_device(batch, rng) works on the card. "
        "Or load in the run's own process: loader.backend=inline loader.num_workers=0."
    )


def hung(timeout_s: float) -> str:
    """The reason of a sample that hangs."""
    return f"it did not come within loader.timeout_s={timeout_s:g}"


def too_late(timeout_s: float) -> DataError:
    """The error of a batch that is late without any sample hanging."""
    return DataError(
        f"No batch came within loader.timeout_s={timeout_s:g} s: a worker is stuck or too slow. "
        "Set loader.timeout_s higher (0 = wait for ever), or loader.backend=inline to see where it hangs."
    )


class NoSampleAtFaultError(Exception):
    """A part of the batch fails and neither of its halves does: it fails as a whole, or now and then."""


def failing_samples(
    indices: Tensor, failure: Failure, ask: Callable[[Tensor], Failure | None], *, most: int
) -> list[tuple[int, Failure]]:
    """The first ``most`` indices that fail, in the order of ``indices``, each with its failure.

    One bad index among n costs about log2(n) questions: ``ask`` says what a part fails with, or None. ``failure`` is
    that of all of them together.

    Raises:
        NoSampleAtFaultError: a part fails and neither of its halves does.
    """
    if len(indices) == 1:
        return [(int(indices[0]), failure)]
    middle = len(indices) // 2
    found: list[tuple[int, Failure]] = []
    for half in (indices[:middle], indices[middle:]):
        if len(found) < most and (of_half := ask(half)) is not None:
            found += failing_samples(half, of_half, ask, most=most - len(found))
    if not found:
        raise NoSampleAtFaultError
    return found


def first_failing_sample(
    request: BatchRequest, purpose: str, failure: Failure, ask: Callable[[BatchRequest], Failure | None]
) -> int:
    """The first index at which a worker hangs, or dies, where the data was asked for a whole batch at once."""
    _LOG.warning(
        "%s batch %d of epoch %d never came: looking for the one of its %d samples that is at fault.",
        purpose.capitalize(), request.batch, request.epoch, len(request.indices),
    )  # fmt: skip
    return failing_samples(request.indices, failure, lambda part: ask(request.only(part)), most=1)[0][0]
