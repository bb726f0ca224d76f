"""Reads the GPUs of a run, detects which figures each offers, and continues when one is lost."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from wellfed.observe.hardware.facts import GpuFacts
from wellfed.observe.nvml.readings import CONFIRMING_TRIES
from wellfed.observe.nvml.session import (
    GpuLostError,
    NoDataError,
    NotSupportedError,
    NvmlAbsentError,
    NvmlError,
    NvmlSession,
)
from wellfed.observe.telemetry.metrics import GpuReaders, Query, Rate, gpm, gpu_queries, power
from wellfed.observe.telemetry.series import Reading, Source
from wellfed.record import EventKind, OnEvent

RETRY_S, LONGEST_RETRY_S = 10.0, 300.0
"""Seconds until the first attempt to reopen a lost GPU, and the longest pause between attempts. The pause doubles,
since each attempt restarts NVML and interrupts the other GPUs' figures."""
MOST_EVENTS = 5
"""Maximum number of events of one kind for a GPU that is lost and found repeatedly."""


@dataclass(frozen=True)
class WatchedGpu:
    """A GPU to watch."""

    index: int
    """CUDA-visible number, under which its figures are published."""
    uuid: str
    is_mig: bool = False

    @classmethod
    def of(cls, gpus: Iterable[GpuFacts]) -> list[WatchedGpu]:
        """Returns those of these GPUs that NVML can read."""
        return [
            cls(gpu.index, gpu.uuid, gpu.is_mig) for gpu in gpus if gpu.uuid is not None and gpu.nvml_index is not None
        ]


@dataclass
class _GpuQuery:
    """One query of the driver, and the figures in its answer."""

    names: tuple[str, ...]
    rate: Rate
    ask: Query
    is_proven: bool = False
    """The GPU has answered it at least once."""

    def __post_init__(self) -> None:
        self.named = frozenset(self.names)


class GpuSource(Source):
    """Source of readings of all GPUs of a run. Its thread may wait for the driver."""

    name = "gpu"

    def __init__(
        self,
        gpus: Sequence[WatchedGpu],
        on_event: OnEvent,
        *,
        session: Callable[[], NvmlSession] = NvmlSession,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._gpus = [_Gpu(gpu, on_event, now_s) for gpu in gpus]
        self._on_event, self._new_session, self._now_s = on_event, session, now_s
        self._session: NvmlSession | None = None
        self._retry_at_s, self._retry_s = -math.inf, RETRY_S
        self._is_refusal_reported = False

    def read(self, *, slow: bool, edge: bool = False) -> Iterator[Reading]:
        """Yields a reading of each available GPU as soon as it is taken; none if NVML can't be used."""
        now_s = self._now_s()
        if self._session is not None and not any(gpu.is_lost for gpu in self._gpus):
            self._retry_s, self._retry_at_s = RETRY_S, now_s + RETRY_S
        elif now_s >= self._retry_at_s:
            self.close()
            self._retry_s = min(2 * self._retry_s, LONGEST_RETRY_S)
            self._retry_at_s = now_s + self._retry_s
            self._open()
        if self._session is None:
            return
        for gpu in self._gpus:
            if (values := gpu.read(slow=slow, edge=edge)) is not None:
                yield Reading(gpu.index, values)

    def close(self) -> None:
        """Closes NVML."""
        session, self._session = self._session, None
        if session is not None:
            for gpu in self._gpus:
                gpu.close()
            session.__exit__(None, None, None)

    def _open(self) -> None:
        session = self._new_session()
        session.tries = CONFIRMING_TRIES
        try:
            self._session = session.__enter__()
        except NvmlError as error:
            # While a GPU is lost the driver may refuse everything for a while.
            if not (self._is_refusal_reported or any(gpu.is_lost for gpu in self._gpus)):
                self._is_refusal_reported = True
                self._on_event("telemetry_trouble", trouble="refused", message=f"{error}. GPU figures are absent.")
            return
        for gpu in self._gpus:
            gpu.open(session)
        session.tries = 1  # from here on a failed call costs one figure


class _Gpu:
    """One GPU. A figure that it does not offer is reported once."""

    def __init__(self, gpu: WatchedGpu, on_event: OnEvent, now_s: Callable[[], float]) -> None:
        self.index, self._on_event = gpu.index, on_event
        self.is_lost = False
        self._readers = GpuReaders(gpu.uuid, is_mig=gpu.is_mig, now_s=now_s)
        self._device = self._readers.device
        self._queries = [
            _GpuQuery(tuple(metric.name for metric in metrics), metrics[0].rate, ask)
            for ask, metrics in gpu_queries().items()
        ]
        self._was_read = False
        self._seen: set[str] = set()
        self._absent: dict[str, str] = {}
        self._num_events: Counter[str] = Counter()

    def open(self, nvml: NvmlSession) -> None:
        """Opens the GPU, at first or again."""
        was_lost = self.is_lost
        try:
            self._device.open(nvml)
        except NvmlError as error:
            self._lose(error)
            return
        if was_lost and not self._device.is_there():  # the driver gives handles even of lost GPUs
            return
        self.is_lost = False
        if was_lost:
            self._event("gpu_back")

    def read(self, *, slow: bool, edge: bool) -> dict[str, float] | None:
        """Returns values by metric name; None if the GPU is lost. The first reading queries everything."""
        if self.is_lost:
            return None
        values: dict[str, float] = {}
        for query in list(self._queries):
            is_due = query.ask is power if edge else query.rate == "fast" or slow
            if (is_due or not self._was_read) and not self._ask(query, values):
                return None
        self._was_read = True
        self._report_absent()
        if self._readers.utilisation.last_failure is not None:
            self._report_failure(self._readers.utilisation.last_failure)
        if self._readers.utilisation.is_stale:
            self._trouble("stale", "the driver's utilisation samples stand still; its latest rate is taken instead.")
        return values

    def close(self) -> None:
        """Frees its samples. Call it before the session ends."""
        self._readers.gpm.close()

    def _ask(self, query: _GpuQuery, values: dict[str, float]) -> bool:
        """Adds the figures of the answer; returns whether the GPU is still there."""
        if values.keys() >= query.named:  # GPM has answered already, and cheaper
            return True
        session = self._device.session
        session.tries = 1 if query.is_proven else CONFIRMING_TRIES
        try:
            answer = query.ask(self._readers)
        except NoDataError:
            pass
        except NvmlAbsentError as error:
            if query.is_proven:
                self._report_failure(error)
            else:
                self._queries.remove(query)
                self._absent.update(dict.fromkeys(query.names, error.reason))
        except NvmlError as error:
            if isinstance(error, GpuLostError) and not self._device.is_there():
                self._lose(error)
                return False
            self._report_failure(error)
        else:
            figures = {query.names[0]: answer} if isinstance(answer, float) else answer
            if query.ask is gpm and not query.is_proven:  # a device may lack some of them
                lacking = [name for name in query.names if name not in figures]
                self._absent.update(dict.fromkeys(lacking, NotSupportedError.reason))
            query.is_proven = True
            for name, value in figures.items():
                values.setdefault(name, value)
            self._seen.update(figures)
        finally:
            session.tries = 1
        return True

    def _report_failure(self, error: NvmlError) -> None:
        self._trouble("errors", f"{error}. Where a call fails its figure is missing.")

    def _trouble(self, trouble: str, message: str) -> None:
        self._event("telemetry_trouble", most=1, trouble=trouble, message=message)

    def _report_absent(self) -> None:
        """Reports absent figures once all queries are resolved, since a fallback query may still give a figure."""
        hoped = {name for query in self._queries if not query.is_proven for name in query.names}
        by_reason: defaultdict[str, list[str]] = defaultdict(list)
        for name in [name for name in self._absent if name not in hoped]:
            reason = self._absent.pop(name)
            if name not in self._seen:
                by_reason[reason].append(name)
        for reason, names in by_reason.items():
            self._event("metric_absent", metrics=names, reason=reason)

    def _lose(self, error: NvmlError) -> None:
        if not self.is_lost:
            self.is_lost = True
            self._event("gpu_lost", message=f"{error}. Its figures are absent until it is back.")

    def _event(self, kind: EventKind, *, most: int = MOST_EVENTS, **facts: object) -> None:
        key = f"{kind} {facts.get('trouble') or facts.get('reason')}"
        self._num_events[key] += 1
        if self._num_events[key] <= most:
            self._on_event(kind, gpu=self.index, **facts)
