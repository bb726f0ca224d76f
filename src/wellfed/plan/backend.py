"""Decides the backend that builds batches: the one set, else the fastest in a timing, else a rule of thumb."""

from __future__ import annotations

from dataclasses import replace

from wellfed.config.schema import Backend, LoaderConfig
from wellfed.data.backends.first_batches import FirstBatches
from wellfed.data.worker_count import WAIT_FRAC
from wellfed.plan.run_plan import DataFacts, Decided, as_set, by_rule
from wellfed.units import show_ms

CHEAP_MS = 0.05
"""Milliseconds of build time below which passing a batch on costs more (0.02-0.03 ms). Between steps, building takes
twice as long as in a row: 0.16 instead of 0.08 ms (2 cores, torch 2.13, `benchmarks/loader.py`)."""
MESSAGE_MS = 1.0
"""Milliseconds of build time below which worker processes are not timed. Passing a batch takes 0.3 ms of the training
process, and as much of the worker (2 cores, torch 2.13). So a step could gain 0.7 ms at most,
and timing worker processes takes 0.3 s."""
SLOW_MS = 250.0
"""Milliseconds of a step and its batch above which no backend is timed, which would take seconds."""
TIE_FRAC = 0.1
"""Minimum relative gain per step for a backend to replace a simpler one. Less is noise of a trial."""
TIMED_LATER = "timed at the start of a training run, which may take another"
"""Reason added to decisions that a run makes by its first batches."""


def candidates(loader: LoaderConfig, data: DataFacts) -> tuple[str, ...]:
    """Returns the backends that ``loader.backend=auto`` may choose; the first wins a tie. Below two: no choice."""
    asked = loader.num_workers
    if loader.backend is not Backend.auto:
        return ()
    if asked == 0:
        return ("inline",) if data.has_fetch else ("inline", "torch")
    if data.has_fetch:
        return ("threads", "processes") if asked or loader.prefetch_factor else ("inline", "threads", "processes")
    if asked:  # workers that were set are kept
        return ("processes",)
    # A set prefetch_factor makes processes win a tie.
    return ("processes", "inline") if loader.prefetch_factor else ("inline", "processes")


def to_time(names: tuple[str, ...], first: FirstBatches) -> tuple[str, ...]:
    """Returns the candidates worth timing, given the time to build one batch, and of a step if it was measured."""
    if len(names) < 2 or first.build_ms < CHEAP_MS or first.build_ms + (first.step_ms or 0.0) > SLOW_MS:
        return ()
    if is_negligible(first):
        return ()
    left = tuple(name for name in names if name != "processes" or first.build_ms >= MESSAGE_MS)
    return left if len(left) > 1 else ()


def is_negligible(first: FirstBatches) -> bool:
    """Returns whether building takes so little of a step that steps count as fed without any worker."""
    return first.step_ms is not None and first.build_ms <= WAIT_FRAC * first.step_ms


def plan_backend(
    loader: LoaderConfig,
    data: DataFacts,
    names: tuple[str, ...],
    first: FirstBatches | None,
    too_large: frozenset[str],
) -> Decided[str]:
    """Decides ``loader.backend``.

    Args:
        names: result of `candidates`.
        first: None = nothing was timed.
        too_large: backends whose batches don't fit into memory.
    """
    if loader.backend is not Backend.auto:
        return Decided(loader.backend.value, f"loader.backend={loader.backend.value}", "set")
    thumb = _rule_of_thumb(loader, data)
    if len(names) < 2:
        return thumb
    if first is None:
        return replace(thumb, because=f"{thumb.because}; {TIMED_LATER}")
    left = tuple(name for name in names if name not in too_large) or ("inline",)
    more = "".join(f"; {name} failed" for name in first.failed)
    more += "".join(f"; no room for {name}" for name in names if name in too_large)
    if first.timed or first.failed:
        return _fastest(left, first, more)
    built, step_ms = f"a batch is built in {show_ms(first.build_ms)}", first.step_ms or 0.0
    ahead = next((name for name in ("threads", "processes") if name in left), "")
    if "inline" in left and is_negligible(first):
        value, because = "inline", f"{built}, hardly anything beside a step of {show_ms(step_ms)}"
    elif first.build_ms + step_ms > SLOW_MS:
        beside = f", a step takes {show_ms(step_ms)}" if step_ms else ""
        value = ahead or "inline"
        because = f"{built}{beside}: {'built beside the steps' if ahead else 'nothing else can be had'}"
    elif "inline" in left:
        value, because = "inline", f"{built}, less than handing it over would cost"
    else:
        value, because = thumb.value, f"{thumb.because}; {built}"
    return Decided(value, f"{because}{more}", "measured")


def _rule_of_thumb(loader: LoaderConfig, data: DataFacts) -> Decided[str]:
    if loader.num_workers == 0:
        name = "inline" if data.has_fetch else "torch"
        return by_rule(name, "loader.num_workers=0: built in the training process")
    if not data.has_fetch:
        return by_rule("processes", "no fetch: Python's lock would let threads take turns")
    ahead = as_set("loader.num_workers", loader.num_workers) or as_set("loader.prefetch_factor", loader.prefetch_factor)
    if ahead:
        return by_rule("threads", f"fetch gives whole batches, and {ahead} asks for some ahead")
    return by_rule("inline", "fetch gives whole batches: cheaper built than handed over")


def _fastest(names: tuple[str, ...], first: FirstBatches, more: str) -> Decided[str]:
    """Returns the fastest timed backend, or the first within a tie of it."""
    timed = {name: first.timed[name] for name in names if name in first.timed}
    if not timed:
        return Decided("inline", f"nothing else worked{more}", "measured")
    fastest_ms = min(timed.values())
    chosen = next(name for name, each_ms in timed.items() if (1 - TIE_FRAC) * each_ms <= fastest_ms)
    times = ", ".join(f"{show_ms(each_ms)} with {name}" for name, each_ms in timed.items() if name != chosen)
    own = f"{show_ms(timed[chosen])} a step"
    if not times:
        because = f"alone in a trial ({own})"
    elif timed[chosen] == fastest_ms:
        because = f"faster in a trial ({own}, {times})"
    else:
        because = f"as fast in a trial, within noise ({own}, {times})"
    return Decided(chosen, f"{because}{more}", "measured")
