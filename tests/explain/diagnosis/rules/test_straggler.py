"""The rank that others wait for is named with the part of its step, and the figure of it that explains that."""

from typing import Any

import pytest

from tests.kit.rank_evidence import of_ranks, rank
from wellfed.explain.diagnosis.finding import Finding
from wellfed.explain.diagnosis.rules.rank_rules import straggler
from wellfed.explain.diagnosis.run_rules import run_rules

FSDP = {"trainer.strategy": "fsdp"}
USUAL_CARD = {"sm_clock_mhz": {"mean": 1980.0}}


def found_in(*ranks: dict[str, Any], **given: Any) -> Finding | None:
    return straggler(of_ranks(*ranks, **given))


def named(*ranks: dict[str, Any], **given: Any) -> tuple[Any, ...] | None:
    found = found_in(*ranks, **given)
    return None if found is None else (found.evidence["rank"], found.evidence["part"])


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize(
    ("slow", "part"),
    [({"wait": 41.0}, "wait"), ({"copy": 30.0}, "copy"), ({"host": 24.0}, "host"), ({"forward": 45.0}, "forward")],
)
def test_the_rank_and_its_part_are_named(number: int, slow: dict[str, float], part: str) -> None:
    found = found_in(*[rank(one, **(slow if one == number else {})) for one in range(4)])
    assert found is not None
    assert (found.id, found.evidence["rank"], found.evidence["part"]) == ("straggler", number, part)
    assert found.advice


def test_gain_machine_and_gpu_of_one_rank() -> None:
    found = found_in(rank(0), rank(1, node=1, gpu="node1/12", wait=41.0))
    assert found is not None
    assert "rank 1 (GPU 12 of node-b)" in found.text
    assert (found.evidence["host"], found.evidence["gpu"]) == ("node-b", "node1/12")
    assert found.evidence["lost_ms"] == pytest.approx(40.0)
    assert found.gain is not None
    assert (found.gain.low, found.gain.factor, found.gain.high) == pytest.approx((1.63, 1.67, 1.71), abs=0.01)


def test_a_slow_forward_pass_costs_up_to_a_slow_backward_pass_more() -> None:
    found = found_in(rank(0), rank(1, forward=45.0))
    assert found is not None
    assert found.gain is not None
    backward_ms = 100 - 1 - 45 - 5 - 4
    assert found.gain.low == pytest.approx(100 / (100 - 15 + 2**0.5), rel=1e-6)
    assert found.gain.high == pytest.approx(100 / (100 - 15 - backward_ms / 3 - 2**0.5), rel=1e-6)


@pytest.mark.parametrize("plan", [{}, FSDP])
def test_a_card_with_a_slow_clock(plan: dict[str, str]) -> None:
    gpus = {"0": USUAL_CARD, "1": {"sm_clock_mhz": {"mean": 1200.0}}}
    found = found_in(rank(0, gpu="0"), rank(1, gpu="1", forward=45.0, optimizer=8.0), plan=plan, gpus=gpus)
    assert found is not None
    assert (found.evidence["rank"], found.evidence["sm_clock_mhz"]) == (1, 1200.0)
    assert "its optimizer takes" not in found.message
    quick = {"0": USUAL_CARD, "1": {"sm_clock_mhz": {"mean": 1800.0}}}
    found = found_in(rank(0, gpu="0"), rank(1, gpu="1", forward=45.0), gpus=quick)
    assert found is not None
    assert "sm_clock_mhz" not in found.evidence


def test_with_fsdp_a_forward_pass_accuses_nobody_and_waiting_does() -> None:
    assert named(rank(0), rank(1, forward=45.0), plan=FSDP) is None
    assert named(rank(0, forward=70.0, work_half_ms=90.0), rank(1, wait=41.0), plan=FSDP) == (1, "wait")


def test_ranks_that_wait_for_rank_0_in_their_passes_or_between_steps_are_not_accused() -> None:
    assert named(rank(0, wait=41.0), rank(1, forward=70.0), rank(2, forward=70.0)) == (0, "wait")
    at_barrier = {"step_ms": 115.0, "host": 4.0 + 15.0}
    assert named(rank(0), rank(1, **at_barrier)) is None
    assert named(rank(0), rank(1, **at_barrier, wait=1.0 + 20.0)) == (1, "wait")


def test_no_healthy_run_is_accused() -> None:
    unknown = {"work_half_ms": None, "between_half_ms": None}
    for others in (
        [rank(1)],
        [rank(1, wait=5.0)],  # 4 % of a step
        [rank(1, host=4 + 9.0)],
        [rank(1, wait=11.0, work_half_ms=20.0, between_half_ms=20.0)],  # within noise
        [rank(1, wait=41.0, **unknown)],
        [rank(1, step_ms=200.0, forward=130.0)],  # they do not step together
        [rank(1, steps=3, wait=80.0)],
        [rank(number, wait=41.0) for number in (1, 2, 3)],  # one quick rank
        [],
    ):
        assert named(rank(0), *others) is None
    spread = [rank(number, forward=30 + 3 * ((number * 37) % 64) / 64) for number in range(64)]
    assert named(*spread) is None


def test_half_of_the_ranks_are_slow_only_with_a_machine_of_their_own() -> None:
    waits = (1.0, 1.0, 41.0, 41.0)
    assert named(*(rank(number, wait=wait) for number, wait in enumerate(waits))) is None
    found = found_in(*(rank(number, wait=wait, node=number // 2) for number, wait in enumerate(waits)))
    assert found is not None
    ranks = [rank(number, node=number // 32, wait=41.0 if 8 <= number < 16 else 1.0) for number in range(64)]
    found = found_in(*ranks)
    assert found is not None


def test_a_straggler_comes_before_what_rank_0_alone_shows() -> None:
    """Rank 0 is the slow one: its waiting has a cause of its own, which is that of this rank alone."""
    evidence = of_ranks(rank(0, wait=41.0), rank(1), loading={"build_ms_mean": 80.0, "cpu_frac": 0.1}, ceiling=1.6)
    found = [finding.id for finding in run_rules(evidence)]
    assert found[0] == "straggler"
    assert "too_few_workers" in found[1:]
