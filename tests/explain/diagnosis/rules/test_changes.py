"""Overrides and gains of findings whose words are in findings.snap.md, and runs that have none of them."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.kit.card_evidence import on_card
from tests.kit.evidence_of import evidence, walled
from tests.kit.loader_evidence import fed_by
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import Finding
from wellfed.explain.diagnosis.rules import compute_rules as compute
from wellfed.explain.diagnosis.rules import feeding_rules as feeding

Rule = Callable[..., Finding | None]
EVEN = np.full(200, 2.0)
FETCH: dict[str, Any] = {"loading": {"has_fetch": True}}
MOVES = {"dram_active_pct": 78, "tensor_active_pct": 2}
LINE = [{"place": "model.py:7", "per_step": 3.0}]
TWO_CARDS = {"events": [{"kind": "data_parallel", "step": 1, "time_s": 1.0, "devices": 4}]}


def asked(rule: Rule, run: Evidence) -> Finding | None:
    """What a rule finds; one of waiting for data is asked if it is the cause."""
    is_of_waiting = rule.__name__ in feeding._OF_CAUSES
    found = feeding.waiting_for_data(run) if is_of_waiting else rule(run)
    return found if found is not None and found.id == rule.__name__ else None


def of_cpu(**more: Any) -> Evidence:
    return fed_by(2, build_ms=40.0, wait_ms=20.0, cpu_frac=0.95, cores=2.0, cpu_pct=190.0, **more)


def crowd(workers: int = 8, *, ceiling: float = 1.6, loader_pct: float = 200.0, **loader: Any) -> Evidence:
    """Workers that take the cores from the steps."""
    cpu = {"cpu_frac": 0.6, "cores": 4.0, "cpu_pct": 390.0, "loader_pct": loader_pct}
    return fed_by(workers, build_ms=20.0, wait_ms=0.1, ceiling=ceiling, loader=loader, **cpu)


@pytest.mark.parametrize(
    ("rule", "run", "change"),
    [
        (feeding.loading_in_main_process, fed_by(0, build_ms=15.0), ("loader.backend=auto", "loader.num_workers=3")),
        (
            feeding.loading_in_main_process,
            fed_by(0, build_ms=15.0, loader={"backend": "torch", "persistent_workers": False}),
            ("loader.backend=auto", "loader.num_workers=3", "loader.persistent_workers=true"),
        ),
        (
            feeding.cpu_bound_loading,
            fed_by(0, build_ms=150.0, cpu_frac=0.98, backend="torch", **FETCH),
            ("loader=auto",),
        ),
        (feeding.too_few_workers, fed_by(1, build_ms=41.0), ("loader.num_workers=5",)),
        (feeding.too_few_workers, fed_by(2, build_ms=160.0, cores=2.0), ("loader.num_workers=17",)),
        (
            feeding.too_few_workers,
            fed_by(1, build_ms=50.0, backend="own"),
            ("loader.num_workers=6",),
        ),
        (feeding.cpu_bound_loading, of_cpu(), ()),
        (
            feeding.cpu_bound_loading,
            of_cpu(backend="torch", **FETCH, overrides=["loader.num_workers=2"]),
            ("loader.backend=auto", "loader.num_workers=null"),
        ),
        (feeding.slow_storage, fed_by(2, build_ms=80.0, iowait_pct=20.0), ("loader.num_workers=9",)),
        (feeding.workers_take_the_cpu, crowd(), ("loader.num_workers=3",)),
        (feeding.workers_take_the_cpu, crowd(workers=2), ()),
        (feeding.slow_handover, fed_by(2, build_ms=12.0, wait_ms=EVEN), ()),
        (feeding.slow_handover, fed_by(2, build_ms=12.0, wait_ms=EVEN, **FETCH), ("loader.backend=threads",)),
        (
            compute.memory_bound,
            on_card(card=MOVES, plan={"gpu.precision": "32-true"}),
            ("gpu.precision=bf16-mixed", "gpu.compile=default"),
        ),
        (compute.memory_bound, on_card(card=MOVES, plan={"gpu.compile": "default"}), ()),
        (compute.memory_bound, on_card(card=MOVES, refused=["gpu.compile"]), ()),
        (compute.synchronisation, on_card(launch_frac=1.0, card={"util_pct": 55}, synchronisations=LINE), ()),
        (compute.data_parallel, on_card(**TWO_CARDS), ("trainer.devices=4", "trainer.strategy=ddp")),
        (compute.clocks_limited, on_card(card={"heat_limited": 1.0}), ()),
    ],
)
def test_a_finding_has_its_overrides(rule: Rule, run: Evidence, change: tuple[str, ...]) -> None:
    found = asked(rule, run)
    assert found is not None
    assert (found.id, found.change) == (rule.__name__, change)
    assert found.change or found.advice or found.is_note


@pytest.mark.parametrize(
    ("rule", "run", "factor"),
    [
        (feeding.loading_in_main_process, fed_by(0, build_ms=15.0, step_ms=9.9), 2.5),
        (feeding.too_few_workers, fed_by(1, build_ms=41.0, step_ms=11.9), 41 / 12),
        (feeding.workers_take_the_cpu, crowd(), 1.6),
    ],
)
def test_a_gain_is_that_of_a_run_that_waits_for_nothing(rule: Rule, run: Evidence, factor: float) -> None:
    found = asked(rule, run)
    assert found is not None
    assert found.gain is not None
    assert found.gain.factor == pytest.approx(factor, rel=0.01)


@pytest.mark.parametrize(
    ("rule", "run"),
    [
        (feeding.loading_in_main_process, fed_by(0, build_ms=0.3)),
        (feeding.loading_in_main_process, fed_by(1, build_ms=40.0)),
        (feeding.loading_in_main_process, fed_by(0, build_ms=15.0, steps=9)),
        (feeding.loading_in_main_process, fed_by(0, build_ms=15.0, cpu_frac=1.0, cores=1.0)),
        (feeding.cpu_bound_loading, fed_by(1, build_ms=40.0, cpu_frac=0.95, cores=8.0)),
        (feeding.slow_storage, fed_by(2, build_ms=80.0, iowait_pct=20.0, cpu_frac=0.9)),
        (feeding.slow_storage, fed_by(2, build_ms=80.0, iowait_pct=1.0)),
        (feeding.workers_take_the_cpu, crowd(ceiling=1.05)),
        (feeding.workers_take_the_cpu, crowd(loader_pct=20.0)),
        (feeding.slow_handover, fed_by(2, build_ms=12.0, wait_ms=EVEN, backend="threads")),
        (feeding.slow_handover, fed_by(2, build_ms=12.0, wait_ms=0.2 * EVEN)),
        (compute.memory_bound, on_card(card=MOVES | {"tensor_active_pct": 40})),
        (compute.data_parallel, on_card()),
        (compute.clocks_limited, on_card()),
        (compute.clocks_limited, on_card(card={"heat_limited": 1.0}, copy_ms=None)),
    ],
)
def test_a_run_without_the_cause_has_no_finding(rule: Rule, run: Evidence) -> None:
    assert asked(rule, run) is None


def test_a_long_warm_up_is_a_note() -> None:
    compute_ms = np.where(np.arange(200) < 3, 3000.0, 10.0)
    run = evidence(steps=200, columns={"compute_ms": compute_ms, "warmup": compute_ms > 100})
    found = feeding.slow_start(run)
    assert found is not None
    assert found.is_note
    assert found.evidence["warmup_s"] == pytest.approx(9.0, rel=0.01)
    assert feeding.slow_start(evidence(steps=200)) is None
    both = feeding.slow_start(evidence(wall=walled(steps_s=8.0, start_s=3.0, end_s=2.0)))
    assert both is not None
    assert "are lost once: 3.0 s before the first step, 2.0 s after the last. A longer" in both.message


def test_workers_wait_for_a_lock_or_were_timed_alone() -> None:
    locked = asked(feeding.contended_loading, fed_by(4, build_ms=100.0, lock_pct=280.0))
    assert locked is not None
    assert "each waits for 70.0 % of its time for a lock that they share (threads" in locked.message
    assert "alone" not in locked.message
    timed = asked(feeding.contended_loading, fed_by(4, build_ms=100.0, loading={"build_ms_alone": 40.0}))
    assert timed is not None
    assert "takes 100 ms to build, 2.5 times as long as by one worker alone" in timed.message
    assert "each waits" not in timed.message


@pytest.mark.parametrize(("cores", "words"), [(1.0, "the one core is full: more"), (2.0, "all 2 cores are full: more")])
def test_full_cores_are_counted(cores: float, words: str) -> None:
    found = asked(feeding.cpu_bound_loading, fed_by(4, build_ms=200.0, cpu_frac=0.9, cores=cores, cpu_pct=100 * cores))
    assert found is not None
    assert words in found.message


def test_data_with_fetch_that_the_process_builds_itself_has_a_certain_gain() -> None:
    run = fed_by(0, build_ms=140.0, step_ms=12.0, cpu_frac=0.95, backend="torch", **FETCH)
    found = asked(feeding.cpu_bound_loading, run)
    assert found is not None
    assert found.gain is not None
    assert found.gain.low == pytest.approx(152.1 / (12.1 + 14.0))
    assert found.change == ("loader=auto",)
