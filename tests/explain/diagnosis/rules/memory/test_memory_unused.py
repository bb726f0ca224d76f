"""Memory that lies idle while a run does more work to save it."""

import pytest

from tests.kit.card_evidence import on_card
from wellfed.explain.diagnosis.rules.memory_rules import memory_unused
from wellfed.explain.diagnosis.run_rules import run_rules

ROOM = {"card": {"sm_active_pct": 60}}


@pytest.mark.parametrize(
    ("figures", "change"),
    [
        ({"plan": {"memory.features": "dynamic"}, "table_gib": 11.9}, ("memory.features=cache",)),
        ({"plan": {"memory.checkpoint_activations": True}}, ("memory.checkpoint_activations=false",)),
    ],
)
def test_what_would_use_it(figures, change):
    found = memory_unused(on_card(**figures))
    assert found is not None
    assert found.change == change
    assert found.message.startswith("30.0 % of the GPU memory budget is used at most (6.00 GiB of 20.00 GiB), while ")


@pytest.mark.parametrize("table_gib", [12.1, None])
def test_features_are_kept_on_the_device_only_if_all_of_them_surely_fit(table_gib):
    """There is no table of features that are trained, and none in the record of an earlier version."""
    assert memory_unused(on_card(plan={"memory.features": "dynamic"}, table_gib=table_gib)) is None


def test_checkpointing_that_the_plan_chose_is_kept_since_nothing_else_fits():
    evidence = on_card(plan={"memory.checkpoint_activations": True})
    evidence.record.plan["memory.checkpoint_activations"]["source"] = "predicted"
    assert memory_unused(evidence) is None


def test_half_empty_cards_are_the_subject_of_another_rule():
    found = run_rules(on_card(num_micro=8, card={"sm_active_pct": 20}))
    assert [finding.id for finding in found] == ["small_batch"]


@pytest.mark.parametrize(
    "figures",
    [{}, ROOM, {"num_micro": 2}, ROOM | {"num_micro": 2, "used_frac": 0.6}, {"plan": {"memory.features": "cache"}}],
)
def test_silent(figures):
    assert memory_unused(on_card(**figures)) is None
