"""What keeps a card from more than it does is one thing at a time, and unknown where figures are missing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.card_evidence import on_card
from tests.kit.evidence_of import evidence
from wellfed.explain.diagnosis.gains.device_load import device_load
from wellfed.explain.diagnosis.run_rules import run_rules

SHARED = {"trainer.devices": 2, "memory.on_oom": "retry"}
LINE = [{"place": "model.py:7", "per_step": 3.0}]
OF_THE_DEVICE = {
    *("launch_bound", "memory_bound", "memory_unused", "small_batch", "synchronisation", "tensor_cores_idle"),
}


@pytest.mark.parametrize(
    ("limit", "figures"),
    [
        (None, {}),
        ("launches", {"launch_frac": 1.0, "card": {"util_pct": 20, "sm_active_pct": 20}}),
        ("launches", {"launch_frac": 1.0, "card": {"util_pct": 95, "sm_active_pct": 20}}),
        ("launches", {"launch_frac": 1.0, "card": {"util_pct": 40, "sm_active_pct": None}}),
        (None, {"launch_frac": 1.0}),  # the host waits for a full queue of launches
        (None, {"launch_frac": 1.0, "card": {"util_pct": 20, "sm_active_pct": 20}, "plan": SHARED}),  # or for a rank
        (None, {"launch_frac": None, "card": {"util_pct": 20, "sm_active_pct": 20}}),  # nobody knows
        ("synchronisation", {"launch_frac": 1.0, "card": {"util_pct": 55}, "synchronisations": LINE}),
        # Without the synchronisations the host would be too slow all the same.
        ("launches", {"launch_frac": 1.0, "card": {"util_pct": 6, "sm_active_pct": 6}, "synchronisations": LINE}),
        (None, {"launch_frac": 1.0, "synchronisations": LINE}),  # it waits, and loses nothing by it
        ("small kernels", {"card": {"sm_active_pct": 30}}),
        ("bandwidth", {"card": {"dram_active_pct": 80, "tensor_active_pct": 0}}),
        (None, {"card": {"dram_active_pct": 60, "tensor_active_pct": 50}}),
    ],
)
def test_the_limit(limit, figures):
    load = device_load(on_card(**figures))
    assert load is not None
    assert load.limit == limit


def test_no_load_is_known():
    assert device_load(evidence()) is None  # a CPU
    assert device_load(on_card(readings=2)) is None
    assert device_load(on_card(wait_ms=5.0)) is None  # starved: the loader's rules say why
    assert device_load(on_card(card={"util_pct": None, "sm_active_pct": None})) is None
    assert device_load(on_card(events=[{"kind": "data_parallel", "devices": 2}])) is None


def test_copies_between_steps_are_no_idle_time_within_them():
    load = device_load(on_card(copy_ms=10.0, card={"util_pct": 49, "sm_active_pct": 49}))
    assert load is not None
    assert load.busy_frac > 0.9


@given(
    util=st.floats(0, 100),
    sm=st.none() | st.floats(0, 100),
    tensor=st.none() | st.floats(0, 100),
    dram=st.none() | st.floats(0, 100),
    launch=st.none() | st.floats(0, 3),
    lines=st.sampled_from([None, [], LINE]),
    num_micro=st.sampled_from([1, 2, 8]),
    used=st.floats(0.01, 1),
    precision=st.sampled_from(["32-true", "bf16-mixed"]),
    capability=st.sampled_from(["6.1", "7.5", "9.0"]),
)
def test_one_cause_has_one_finding(util, sm, tensor, dram, launch, lines, num_micro, used, precision, capability):
    found = run_rules(
        on_card(
            card={"util_pct": util, "sm_active_pct": sm, "tensor_active_pct": tensor, "dram_active_pct": dram},
            launch_frac=launch,
            num_micro=num_micro,
            used_frac=used,
            synchronisations=lines,
            capability=capability,
            plan={"gpu.precision": precision, "gpu.tf32": False},
        )
    )
    assert len(OF_THE_DEVICE & {finding.id for finding in found}) <= 1
