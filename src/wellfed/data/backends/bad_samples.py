"""Names samples and batches that fail in errors. Failing samples are left out up to loader.max_skipped."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from wellfed.data.backends.batch_request import BatchRequest, LostSample
from wellfed.data.settings import LoaderSettings
from wellfed.errors import DataError, reason_of
from wellfed.record.entries import OnEvent, ignore_event

_LOG = logging.getLogger(__name__)
_OF_CODE = ("TypeError", "NameError", "UnboundLocalError", "AttributeError")
"""Errors that a mistake in the dataset's code raises for each sample, and damaged data at times."""
_SHARED = (
    "It loads in the training process: the fault passed, or workers share something that only one process or thread "
    "may use, such as an open file, a connection, or the GPU. Open it where it is first used (if self.file is None: "
    "self.file = open(...)), or set loader.backend=inline loader.num_workers=0."
)
"""Way out for a sample or batch that fails in a worker alone."""
Loads = Callable[[int, int], bool]
"""Function that returns whether a sample loads in the training process, by its epoch and index."""


class UnreadBatch(DataError):
    """Raised for a batch that ``fetch`` or ``__getitems__`` could not load."""

    problem = ""
    """The message without a way out."""


class BadSamples:
    """The samples that failed so far. They are never requested again, in this run or when it is resumed."""

    def __init__(
        self,
        name: str,
        settings: LoaderSettings,
        *,
        on_event: OnEvent = ignore_event,
        may_skip: bool = True,
        loads: Loads | None = None,
    ) -> None:
        """
        Args:
            name: class of the dataset, for messages.
            on_event: receives a ``sample_skipped`` for each sample that is left out.
            may_skip: whether loader.max_skipped is possible (one rank).
            loads: asks again for a sample that failed in a worker; None = the training process builds the batches.
        """
        self._loads = loads
        self._name, self._most, self._skip_ids = name, settings.max_skipped, settings.skip_ids
        self._may_skip, self._on_event = may_skip, on_event
        self._reasons: dict[int, str] = {}
        self._bad = torch.empty(0, dtype=torch.int64)

    @property
    def indices(self) -> list[int]:
        """Indices that are left out, in the order in which they failed."""
        return list(self._reasons)

    def remember(self, indices: Sequence[int]) -> None:
        """Sets the samples to leave out, from the resumed run or from an earlier position of this one."""
        new = [index for index in indices if index not in self._reasons]
        self._reasons = {index: self._reasons.get(index, "failed before the run was resumed") for index in indices}
        self._bad = torch.tensor(self.indices, dtype=torch.int64)
        if new:
            _LOG.info("Samples %s are left out: they failed before the run was resumed.", new)

    def leave_out(self, indices: Tensor) -> Tensor:
        """Returns the indices without those that are known to fail."""
        return indices[~torch.isin(indices, self._bad)] if self._reasons else indices

    def take(self, lost: Sequence[LostSample], epoch: int, batch: int) -> None:
        """Adds samples that have just failed, each once.

        Raises:
            DataError: more than loader.max_skipped have failed, or the samples are not the cause.
        """
        for one in lost:
            if one.index in self._reasons:  # drawn again, in this batch or in one requested before it failed
                continue
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
        """Returns the error of a step that has lost all its samples."""
        return DataError(
            f"{self._name}: all samples of training batch {batch} of epoch {epoch} are left out, and a step needs one. "
            f"Set {self._skipping(self.indices)}: then they belong to no step."
        )

    def _too_many(self, last: LostSample, epoch: int, batch: int) -> DataError:
        place = f"(epoch {epoch}, batch {batch}): {last.reason}"
        if self._loads is not None and self._loads(epoch, last.index):
            return DataError(
                f"{self._name}: training sample {last.index} could not be loaded by a worker {place}. {_SHARED}"
            )
        ids = [*self.indices, last.index]
        way_out = _mend_first(last, f"Set {self._skipping(ids)}, or repair {'it' if len(ids) == 1 else 'them'}.")
        if self._most == 0:
            may_help = self._may_skip and not last.reason.startswith(_OF_CODE)
            more = " loader.max_skipped=1 leaves out what fails." if may_help else ""
            return DataError(f"{self._name}: training sample {last.index} could not be loaded {place}. {way_out}{more}")
        before = "; ".join(f"{index}: {reason}" for index, reason in self._reasons.items())
        return DataError(
            f"{self._name}: {len(ids)} training samples could not be loaded, and loader.max_skipped={self._most} "
            f"allows no more. Before: {before}. Now {last.index} {place}. {way_out}"
        )

    def _skipping(self, ids: Sequence[int]) -> str:
        """Returns the override that skips these samples in addition to those already skipped."""
        return f"loader.skip_ids=[{','.join(map(str, (*self._skip_ids, *ids)))}]"


def evaluation_error(name: str, lost: LostSample, batch: int, loads: Loads | None = None) -> DataError:
    """Returns the error of an evaluation. It leaves out no sample, since its metrics would belong to another set.

    Args:
        loads: as for `BadSamples`.
    """
    sample, place = f"{name}: evaluation sample {lost.index} could not be loaded", f"(batch {batch}): {lost.reason}."
    if loads is not None and loads(0, lost.index):
        return DataError(f"{sample} by a worker {place} {_SHARED}")
    way_out = _mend_first(lost, "Repair it or remove it from the set: evaluation leaves nothing out.")
    return DataError(f"{sample} {place} {way_out}")


def _mend_first(lost: LostSample, way_out: str) -> str:
    if not lost.reason.startswith(_OF_CODE):
        return way_out
    doubt = "Do other samples raise it too? Then mend the code of the dataset. Otherwise"
    return f"{doubt} {way_out[0].lower()}{way_out[1:]}"


def unread_batch(dataset: Any, method: str, request: BatchRequest, purpose: str, error: Exception) -> DataError:
    """Returns the error of a batch whose ``fetch`` or ``__getitems__`` raised, with its indices."""
    name, reason = type(dataset).__name__, reason_of(error)
    problem = f"{name}: {method} could not load {request.described(purpose)}: {reason}."
    if method == "fetch":
        way_out = "dataset[index] shows which sample fails: repair it"
        if purpose == "training":
            way_out += ", or add it to loader.skip_ids. loader.max_skipped is for data without fetch"
    else:
        way_out = "Each of these samples loads alone: mend __getitems__ for several indices"
    fault = UnreadBatch(f"{problem} {way_out}.")
    fault.problem = problem
    fault.add_note("".join(traceback.format_exception(error)).rstrip())  # a worker sends no cause
    return fault


def shared_by_workers(error: UnreadBatch) -> DataError:
    """Returns the error of a batch that a worker could not load, and the training process could."""
    fault = DataError(f"{error.problem} {_SHARED}")
    fault.__notes__ = error.__notes__
    return fault


def too_late(request: BatchRequest, purpose: str, timeout_s: float) -> DataError:
    """Returns the error of a batch that did not come in time."""
    is_training = purpose == "training" and len(request.indices)
    way_out = " If a sample hangs (dataset[index] shows which), repair it or add it to loader.skip_ids."
    return DataError(
        f"No batch came within loader.timeout_s={timeout_s:g} s: a worker is stuck or too slow. It was asked for "
        f"{request.described(purpose)}. Set loader.timeout_s higher (0 = wait for ever), or loader.backend=inline "
        f"loader.num_workers=0 to see where it hangs.{way_out if is_training else ''}"
    )
