"""Decides the backend that builds batches: the one set, else the fastest in a timing, else a rule of thumb."""

from __future__ import annotations

from collections.abc import Mapping

from wellfed.config.schema import Backend, LoaderConfig
from wellfed.data.backends.first_batches import FirstBatches
from wellfed.plan.run_plan import DataFacts, Decided, as_set, by_rule
from wellfed.units import show_ms

CHEAP_MS = 0.05
"""Milliseconds of build time below which passing a batch on costs more (0.02-0.03 ms). Between steps, building takes
twice as long as in a row: 0.16 instead of 0.08 ms (2 cores, torch 2.13, `benchmarks/loader.py`)."""
MESSAGE_MS = 1.0
"""Milliseconds of build time below which worker processes are not timed. Passing a batch takes 0.3 ms of the training
process, and as much of the worker (2 cores, torch 2.13). So a step could gain 0.7 ms at most,
and timing worker processes takes 0.3 s."""
SLOW_MS = 100.0
"""Milliseconds of build time above which workers are used without a timing, which would take seconds."""
TIE_FRAC = 0.1
"""Minimum relative gain per step for a backend to replace a simpler one."""
_WITH_TIMEOUT = ("conservative", "balanced", "aggressive")
"""Loader options with a timeout that applies only if there are workers."""


def timeout_for_workers(loader: LoaderConfig, choices: Mapping[str, str]) -> str:
    """Returns the timeout that requires workers, as typed; empty if there is none."""
    return as_set("loader.timeout_s", loader.timeout_s) if asks_for_timeout(loader, choices) else ""


def asks_for_timeout(loader: LoaderConfig, choices: Mapping[str, str]) -> bool:
    """Returns whether a timeout is set, but not by a loader option."""
    return bool(loader.timeout_s) and choices.get("loader") not in _WITH_TIMEOUT


def candidates(loader: LoaderConfig, data: DataFacts, choices: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the backends that ``loader.backend=auto`` may choose; the first wins a tie. Below two: no choice."""
    if loader.backend is not Backend.auto:
        return ()
    if timeout_for_workers(loader, choices):
        # Samples may hang, so they are not tried in the training process.
        return ()
    if loader.num_workers == 0:
        return ("inline",) if data.has_fetch or data.is_iterable else ("inline", "torch")
    if not data.has_fetch:
        if loader.num_workers:  # workers that were set are kept
            return ("processes",)
        # A set prefetch_factor makes processes win a tie.
        return ("processes", "inline") if loader.prefetch_factor else ("inline", "processes")
    if loader.num_workers or loader.prefetch_factor:
        return ("threads", "processes")
    return ("inline", "threads", "processes")


def to_time(names: tuple[str, ...], first: FirstBatches) -> tuple[str, ...]:
    """Returns the candidates worth timing, given the time to build one batch."""
    if len(names) < 2 or not CHEAP_MS <= first.build_ms < SLOW_MS:
        return ()
    left = tuple(name for name in names if name != "processes" or first.build_ms >= MESSAGE_MS)
    return left if len(left) > 1 else ()


def plan_backend(
    loader: LoaderConfig,
    data: DataFacts,
    choices: Mapping[str, str],
    names: tuple[str, ...],
    first: FirstBatches | None,
    too_large: frozenset[str],
) -> Decided[str]:
    """Decides ``loader.backend``.

    Args:
        names: result of `candidates`.
        too_large: backends whose batches don't fit into memory.
    """
    if loader.backend is not Backend.auto:
        return Decided(loader.backend.value, f"loader.backend={loader.backend.value}", "set")
    thumb = _rule_of_thumb(loader, data, timeout_for_workers(loader, choices))
    if first is None or len(names) < 2:
        return thumb
    left = tuple(name for name in names if name not in too_large) or ("inline",)
    more = "".join(f"; {name} failed" for name in first.failed)
    more += "".join(f"; no room for {name}" for name in names if name in too_large)
    return _measured(first, left, thumb, more)


def _rule_of_thumb(loader: LoaderConfig, data: DataFacts, watch: str) -> Decided[str]:
    if loader.num_workers == 0:
        name = "inline" if data.has_fetch or data.is_iterable else "torch"
        return by_rule(name, "loader.num_workers=0: built in the training process")
    if data.is_iterable:
        return by_rule("processes", "a stream is read in Python, whose lock would let threads take turns")
    if not data.has_fetch:
        return by_rule("processes", "only __getitem__: Python's lock would let threads take turns")
    ahead = as_set("loader.num_workers", loader.num_workers) or as_set("loader.prefetch_factor", loader.prefetch_factor)
    if ahead:
        return by_rule("threads", f"fetch gives whole batches, and {ahead} asks for some ahead")
    if watch:
        return by_rule("threads", f"fetch gives whole batches, and {watch} asks to watch who builds them")
    return by_rule("inline", "fetch gives whole batches: cheaper built than handed over")


def _measured(first: FirstBatches, names: tuple[str, ...], thumb: Decided[str], more: str) -> Decided[str]:
    """Decides by the times of the first batches; ``more`` names failed and excluded backends."""
    built = f"a batch is built in {show_ms(first.build_ms)}"
    if first.timed:
        name = _fastest(names, first)
        took = ", ".join(f"{name} {show_ms(found.period_ms)}" for name, found in first.timed.items())
        fastest = min(first.timed, key=lambda each: first.timed[each].period_ms)
        tie = "" if name == fastest else "; a tie goes to the first named"
        because = f"timed beside simulated steps of {show_ms(first.step_ms)}: step and batch take {took}{tie}{more}"
        return Decided(name, because, "measured")
    if first.build_ms >= SLOW_MS:
        ahead = [name for name in ("threads", "processes") if name in names]
        why = "too long to time others" if ahead else "nothing else can be had"
        return Decided(ahead[0] if ahead else "inline", f"{built}: {why}{more}", "measured")
    if "inline" in names:
        because = f"{built}, less than handing it over would cost: nothing else was timed{more}"
        return Decided("inline", because, "measured")
    return Decided(thumb.value, f"{thumb.because}; {built}: nothing else was timed{more}", "measured")


def _fastest(names: tuple[str, ...], first: FirstBatches) -> str:
    """Returns the first timed backend, unless a later one is faster beyond a tie and beyond noise."""
    best, *others = [name for name in names if name in first.timed] or ["inline"]
    for name in others:
        one, other = first.timed[best], first.timed[name]
        gain_ms = one.period_ms - other.period_ms
        noise_ms = 2 * (one.noise_ms**2 + other.noise_ms**2) ** 0.5
        if gain_ms > max(noise_ms, TIE_FRAC * one.period_ms):
            best = name
    return best
