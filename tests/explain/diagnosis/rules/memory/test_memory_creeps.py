"""Memory that never comes to rest is told from caches that fill and allocators that find their size."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.card_evidence import on_card
from tests.kit.evidence_of import evidence
from wellfed.explain.diagnosis.rules.memory_rules import device_memory_full, memory_creeps
from wellfed.explain.diagnosis.run_rules import run_rules
from wellfed.explain.diagnosis.run_tables import Series
from wellfed.observe.telemetry.series import HOST

N = 200
RAMP = np.linspace(0, 1, N)


def check(used_gib: Any, **given: Any) -> Any:
    return memory_creeps(on_card(readings=len(used_gib), card={"mem_used_gib": used_gib}, **given))


def test_a_leak_on_the_card():
    found = check(4 + 6 * RAMP)
    assert found is not None
    assert found.message.startswith("Memory in use on GPU 0 grew from 4.14 GiB to 10.00 GiB and was still growing")
    assert "gpu.allocator=expandable" in found.advice
    assert found.severity == "low"


def test_a_leak_that_filled_the_card_is_the_cause_and_not_the_size_of_batches():
    full = on_card(status="oom", readings=N, card={"mem_used_gib": 4 + 19 * RAMP}, events=[{"kind": "oom", "step": 99}])
    first, *_ = run_rules(full)
    assert (first.id, first.severity) == ("memory_creeps", "high")
    assert "until it was full" in first.message
    assert device_memory_full(full) is None


@given(st.integers(0, 2**16), st.floats(0.02, 0.3), st.integers(5, 40))
def test_a_leak_that_grows_in_steps_and_noise(seed: int, noise: float, stairs: int):
    rng = np.random.default_rng(seed)
    used = 4 + 6 * np.ceil(RAMP * stairs) / stairs + noise * rng.standard_normal(N)
    assert check(used) is not None


@pytest.mark.parametrize(
    "used_gib",
    [
        np.full(N, 20.0),
        4 + 8 * (1 - np.exp(-12 * RAMP)),  # a cache that fills
        np.where(RAMP > 0.5, 12.0, 4.0),  # a longer batch, once
        4 + 0.5 * RAMP,  # too little to matter
        12 - 6 * RAMP,
        8 + 4 * np.sin(40 * RAMP),
    ],
)
def test_memory_that_comes_to_rest(used_gib: Series):
    assert check(used_gib) is None


def host(rss_gib: Series, epochs: int) -> Any:
    curves = {HOST: {"time_s": np.arange(float(len(rss_gib))), "rss_gib": rss_gib}}
    table = {"epoch": np.arange(100) * epochs // 100}
    return evidence(curves=curves, columns=table, machine={"ram_gib": 64.0})


def test_a_leak_on_the_host():
    found = memory_creeps(host(10 + 8 * RAMP, epochs=4))
    assert found is not None
    assert found.message.startswith("Host memory of this run grew from 10.18 GiB to 18.00 GiB")


def test_nothing_is_said_of_few_readings_or_a_card_of_unknown_size():
    assert check(4 + 6 * np.linspace(0, 1, 15)) is None
    assert check(4 + 6 * RAMP, machine={}) is None
    assert memory_creeps(evidence()) is None


def test_a_run_on_the_cpu_is_not_blamed_for_what_others_keep_on_a_gpu():
    assert check(4 + 6 * RAMP, copy_ms=None) is None
