"""Live figures of a run: the line below the bar, and one early warning. The bar asks for them when it redraws."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
from rich.text import Text

from wellfed.errors import text_of
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import waiting_colour
from wellfed.explain.diagnosis.run_rules import run_rules
from wellfed.explain.diagnosis.run_tables import Series
from wellfed.explain.diagnosis.thresholds import FEWEST_OF_CARD, FEWEST_STEPS, OTHERS_FRAC
from wellfed.explain.report.last_screen import gain_in_brackets, show_of_budget, show_utilisation, verdict_of, way_out
from wellfed.observe.telemetry.machines import HOST, is_host
from wellfed.observe.telemetry.metrics import SLOW_S
from wellfed.observe.telemetry.series import Sample
from wellfed.observe.timing.readiness import StepTable, summarise
from wellfed.observe.timing.step_clock import WARMUP_STEPS, StepRow
from wellfed.plan.run_plan import RunPlan
from wellfed.record import FindingEntry
from wellfed.run.bookkeeper import Bookkeeper
from wellfed.units import counted, show_count, show_gib

_LOG = logging.getLogger(__name__)
LATEST_S, LATEST_POWER_S = 5.0, 3 * SLOW_S
"""Seconds of readings that the line covers, and of power, which is read less often."""
_LATEST_STEPS = 50
_LATEST = 10_000
"""Latest steps that a warning is about: more would hold up the training for longer."""
WARN_STEPS, WARN_S = 30, 60.0
"""Steps after the warm-up, or seconds of training, after which a finding is reported."""


class LiveStatus:
    """Status of a training that lasts; costs nothing between two calls."""

    def __init__(
        self, books: Bookkeeper, plan: RunPlan, unit: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """
        Args:
            unit: name of the samples.
            clock: returns seconds; tests replace it.
        """
        self._books, self._plan, self._unit, self._clock = books, plan, unit, clock
        self._began_s = clock()
        self._rows_before = len(books.journal.rows)
        # Workers start one after the other, so that the first batch of each may be late.
        self._warmup = WARMUP_STEPS + plan.loader.num_workers
        self._checks = [self._has_steps, self._has_lasted]

    def rate(self) -> str:
        """Returns samples/s of the latest steps; empty if unknown."""
        recent = self._books.journal.recent(_LATEST_STEPS)
        rate = None if recent is None else recent.samples_per_s
        return f"{show_count(rate)} {self._unit}/s" if rate else ""

    def parts(self) -> list[Text]:
        """Returns the latest figures of the device and of the host, with the waiting for data."""
        now_s, readings = self._books.journal.time_s(), self._books.readings()
        latest = [sample for sample in readings if sample.time_s >= now_s - LATEST_S]
        if not self._plan.on_gpu:
            return [*self._host(latest), *self._wait()]
        return [
            *self._lost(),
            *self._utilisation(latest),
            *self._wait(),
            *self._memory(),
            *self._power(readings, now_s),
        ]

    def warning(self) -> str | None:
        """Returns the first finding that already stands, with its overrides; None otherwise. It looks twice: after
        `WARN_STEPS`, and after `WARN_S`."""
        due = [check for check in self._checks if check()]
        if not due:
            return None
        self._checks = [check for check in self._checks if check not in due]
        try:
            finding, steps = self._finding()
        except Exception as error:  # noqa: BLE001  the training must not be lost to a faulty rule
            _LOG.warning("A rule failed, so no early warning is given: %s", text_of(error))
            _LOG.info("The rule that failed:", exc_info=True)
            return None
        if finding is None:
            return None
        self._checks.clear()
        word, sentence = verdict_of(finding)
        advice = way_out(finding)
        if finding["change"]:
            learning = ", which changes what is learned" if finding["changes_learning"] else ""
            advice = f"{' '.join(finding['change'])}{gain_in_brackets(finding)}{learning}."
        advice = f" For the next run: {advice}" if advice else ""
        return f"After {counted(steps, 'step')}: {word}. {sentence}{advice}"

    def _has_steps(self) -> bool:
        return self._num_steady() >= WARN_STEPS and self._is_watched()

    def _has_lasted(self) -> bool:
        return self._clock() - self._began_s >= WARN_S and self._num_steady() >= FEWEST_STEPS

    def _num_steady(self) -> int:
        return len(self._books.journal.rows) - self._rows_before - self._warmup

    def _is_watched(self) -> bool:
        """Returns whether other programs would have been seen by now."""
        host = [sample for sample in self._books.readings() if sample.gpu == HOST and sample.phase == "train"]
        return not self._books.is_watching or len(host) > FEWEST_OF_CARD

    def _finding(self) -> tuple[FindingEntry | None, int]:
        """Returns the costliest finding so far, if it costs a good share of the time, and the number of steps."""
        columns = StepTable.of(self._books.journal.rows).after(self._rows_before + self._warmup)
        columns = columns.latest(_LATEST).steady()
        summary, record = summarise(columns), self._books.record
        if summary is None:
            return None, 0
        so_far = replace(
            record,
            throughput=summary.throughput(self._unit),
            time=summary.time(),
            readiness_frac=summary.readiness_frac,
            loading={**record.loading, **summary.loading()},
            host={"core_wait_frac": self._books.wall.core_wait_frac},
            # What an earlier process of a resumed run has measured is not of these steps.
            ceiling=None,
            wall=None,
            phases={},
        )
        in_training = [sample for sample in self._books.readings() if sample.phase == "train"]
        found = run_rules(Evidence(so_far, _table(columns), _curves(in_training)))
        costly = (finding for finding in found if not finding.is_note and finding.severity in ("high", "medium"))
        first = next(costly, None)
        return None if first is None else first.entry(), summary.steps

    def _wait(self) -> Iterator[Text]:
        recent = self._books.journal.recent(_LATEST_STEPS)
        if recent is not None:
            frac = float(recent.column("wait_ms").sum()) / float(recent.step_ms.sum())
            yield Text(f"wait {100 * frac:.0f} %", waiting_colour(frac))

    def _utilisation(self, latest: Sequence[Sample]) -> Iterator[Text]:
        by_gpu: dict[int, list[float]] = {}
        for sample in latest:
            if "util_pct" in sample.values and not is_host(sample.gpu):
                by_gpu.setdefault(sample.gpu, []).append(sample.values["util_pct"])
        yield from show_utilisation([sum(values) / len(values) for values in by_gpu.values()])

    def _memory(self) -> Iterator[Text]:
        held_gib = self._books.held_gib()
        if held_gib is not None:
            yield Text(f"mem {show_of_budget(held_gib, self._plan.device.memory_gib)}")

    def _power(self, readings: Sequence[Sample], now_s: float) -> Iterator[Text]:
        latest = [one for one in readings if one.time_s >= now_s - LATEST_POWER_S and not is_host(one.gpu)]
        watts = {one.gpu: one.values["power_w"] for one in latest if "power_w" in one.values}
        if watts:
            yield Text(f"{sum(watts.values()):.0f} W")

    def _lost(self) -> Iterator[Text]:
        if lost := [str(event.get("gpu")) for event in self._books.record.events if event["kind"] == "gpu_lost"]:
            yield Text(f"GPU {', '.join(lost)} lost", "bold red")

    def _host(self, latest: Sequence[Sample]) -> Iterator[Text]:
        """Yields cores and memory of the run, and the cores of other programs."""
        values = {name: value for sample in latest if sample.gpu == HOST for name, value in sample.values.items()}
        cores = self._books.record.machine.get("cpu_quota_cores")
        if "cpu_pct" in values:
            of = "" if cores is None else f" of {cores:.3g}"
            yield Text(f"CPU {values['cpu_pct'] / 100:.1f}{of} cores")
        of_host = _curves([one for one in latest if one.gpu == HOST])
        others = Evidence(self._books.record, {}, of_host).telemetry.mean_others_cores
        if others is not None:
            is_much = cores is not None and others >= OTHERS_FRAC * cores
            yield Text(f"other programs {others:.1f}", "yellow" if is_much else "")
        if "rss_gib" in values:
            yield Text(f"mem {show_gib(values['rss_gib'])}")


def _table(columns: StepTable) -> dict[str, Series]:
    """Returns the columns of steps.csv of these steps."""
    return {**{name: columns.column(name) for name in StepRow._fields}, "ready": columns.ready}


def _curves(samples: Sequence[Sample]) -> dict[int, dict[str, Series]]:
    """Returns the columns of telemetry.csv of these readings, by GPU and host."""
    by_gpu: dict[int, list[Sample]] = {}
    for sample in samples:
        by_gpu.setdefault(sample.gpu, []).append(sample)
    return {
        gpu: {
            "time_s": np.array([one.time_s for one in own]),
            "step": np.array([one.step for one in own], dtype=float),
            **{name: np.array([one.values.get(name, np.nan) for one in own]) for name in _names(own)},
        }
        for gpu, own in by_gpu.items()
    }


def _names(samples: Sequence[Sample]) -> set[str]:
    return {name for sample in samples for name in sample.values}
