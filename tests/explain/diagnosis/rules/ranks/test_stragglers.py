"""The rank that the others wait for is named, with its cause, the gain, and the override where one helps."""

from typing import Any

import pytest

from tests.kit.rank_evidence import of_ranks, rank
from wellfed.explain.diagnosis.finding import Finding
from wellfed.explain.diagnosis.run_rules import OF_RANKS, run_rules

ON_CARDS = {"0": {"sm_clock_mhz": {"mean": 1980.0}, "heat_limited": {"mean": 0.0}}}


def of_rules(*ranks: dict[str, Any], **given: Any) -> Finding | None:
    """Returns the only finding of the rules on ranks."""
    evidence = of_ranks(*ranks, **given)
    found = [finding for rule in OF_RANKS if (finding := rule(evidence)) is not None]
    assert len(found) <= 1
    return found[0] if found else None


def cards(**of_second: float) -> dict[str, Any]:
    return {"gpus": {**ON_CARDS, "1": {name: {"mean": value} for name, value in of_second.items()}}}


def on_cards(second: dict[str, Any], **given: Any) -> Finding | None:
    return of_rules(rank(0, gpu="0"), rank(1, gpu="1", **second), **given)


@pytest.mark.parametrize("number", range(4))
def test_a_rank_whose_batches_come_late(number: int) -> None:
    ranks = [rank(one, **({"wait": 41.0, "build_ms": 80.0} if one == number else {})) for one in range(4)]
    found = of_rules(*ranks)
    assert found is not None
    assert (found.id, found.evidence["rank"], found.severity) == ("input_straggler", number, "high")
    usual = 2 if number < 2 else 1
    assert found.text == (
        f"All other ranks wait for rank {number} (on node-a): in each step it waits 41 ms for data, and rank {usual} "
        f"waits 1 ms. It builds a batch in 80 ms, rank {usual} in 8 ms. Try: loader.num_workers=3, about 1.67 times as "
        "fast (1.64 to 1.70), predicted."
    )


def test_workers_are_not_advised_where_building_needs_cores_that_are_busy() -> None:
    late = rank(1, wait=41.0, build_ms=80.0, build_cpu_frac=1.0, machine_cores=7.5)
    found = of_rules(rank(0), late)
    assert found is not None
    assert found.change == ()
    assert found.text.endswith(
        "If it were like the others, steps would be about 1.67 times as fast (1.63 to 1.71), predicted."
    )


def test_a_slow_forward_pass_without_a_cause_costs_up_to_a_slow_backward_pass_more() -> None:
    found = of_rules(rank(0), rank(1, forward=45.0))
    assert found is not None
    assert (found.id, found.evidence["rank"]) == ("compute_straggler", 1)
    assert "its forward pass takes 45 ms of a step, that of rank 0 30 ms" in found.message
    assert found.gain is not None
    backward_ms = 100 - 1 - 45 - 5 - 4
    assert found.gain.low == pytest.approx(100 / (100 - 15 + 2**0.5), rel=1e-6)
    assert found.gain.high == pytest.approx(100 / (100 - 15 - backward_ms / 3 - 2**0.5), rel=1e-6)


def test_a_slow_copy_on_one_rank() -> None:
    plan = {"loader.pin_memory": False, "loader.device_prefetch": 0}
    found = on_cards({"copy": 30.0}, plan=plan)
    assert found is not None
    assert (found.id, found.change) == ("copy_straggler", ("loader.pin_memory=true", "loader.device_prefetch=2"))
    assert "rank 1 (GPU 1 of node-a): each step waits 30 ms for its copy to the GPU, that of rank 0 0 ms" in found.text
    kept = on_cards({"copy": 30.0}, plan={"loader.pin_memory": True, "loader.device_prefetch": 2})
    assert kept is not None
    assert (kept.change, "nvidia-smi topo -m" in kept.message) == ((), True)


def test_callbacks_of_one_rank() -> None:
    found = of_rules(rank(0, host=24.0), rank(1), rank(2))
    assert found is not None
    assert (found.id, found.evidence["rank"]) == ("host_straggler", 0)
    assert of_rules(rank(0, host=4 + 9.0), rank(1)) is None  # rank 0 writes the files


@pytest.mark.parametrize("more", [{"samples": 48.0}, {"batch_mib": 6.0}])
def test_larger_batches_explain_a_slow_rank(more: dict[str, float]) -> None:
    found = of_rules(rank(0), rank(1, forward=45.0, **more))
    assert found is not None
    assert (found.id, found.evidence["rank"]) == ("uneven_shares", 1)
    assert ("48 samples, those of rank 0 32" in found.text) == ("samples" in more)
    assert ("6.0 MiB, those of rank 0 4.0 MiB" in found.text) == ("batch_mib" in more)
    slow = of_rules(rank(0), rank(1, forward=60.0, samples=36.0))
    assert slow is not None
    assert slow.id == "compute_straggler"  # twice the time for an eighth more samples


@pytest.mark.parametrize(
    ("figures", "machine", "said"),
    [
        ({"heat_limited": 0.6, "sm_clock_mhz": 1200.0}, {}, "held down by heat in 60.0 % of the readings, at 1200 MHz"),
        ({"power_limited": 0.6}, {}, "held down by its power limit in 60.0 % of the readings"),
        ({"sm_clock_mhz": 1400.0}, {}, "its GPU runs at 1400 MHz, that of rank 0 at 1980 MHz"),
        (
            {"sm_clock_mhz": 1980.0},
            {"gpus": [{"index": 0}, {"index": 1, "holders": [{"pid": 1, "name": "x", "memory_gib": 9.0}]}]},
            "other processes hold 9.00 GiB of its GPU",
        ),
    ],
)
def test_a_card_that_is_slow(figures: dict[str, float], machine: dict[str, Any], said: str) -> None:
    for plan in ({}, {"trainer.strategy": "fsdp"}):
        found = on_cards({"forward": 45.0}, plan=plan, machine=machine, **cards(**figures))
        if (plan and "sm_clock_mhz" not in figures) or (plan and machine):
            continue  # only the clock shows how much slower it is where compute contains waiting
        assert found is not None
        assert (found.id, found.evidence["rank"], found.evidence["gpu"]) == ("slow_gpu", 1, "1")
        assert said in found.message


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ({"forward": 60.0, "core_wait_frac": 0.3}, "had no core for 30.0 % of the time, rank 0 for 0.0 %"),
        ({"forward": 60.0, "machine_cores": 7.9}, "other programs take 6.9 of the 8 cores of its machine"),
        ({"wait": 31.0, "iowait_cores": 1.5}, "1.5 cores of its machine wait for its disk, 0.0 on the machine of"),
    ],
)
def test_a_machine_that_others_use(second: dict[str, float], said: str) -> None:
    found = of_rules(rank(0), rank(1, node=1, **second))
    assert found is not None
    assert (found.id, found.evidence["rank"], found.evidence["host"]) == ("slow_machine", 1, "node-b")
    assert said in found.message


def test_a_slow_link_makes_all_ranks_wait_alike() -> None:
    process = {"torch_threads": 1, "parameter_tensors": 4, "parameter_values": 25_000_000, "busy_threads": []}
    slow = [rank(number, forward=10.0) for number in range(2)]
    found = of_rules(*slow, process=process)
    assert found is not None
    assert (found.id, found.change) == ("slow_link", ("memory.on_oom=fail",))
    assert (
        "50 ms of each step of 100 ms (50.0 %) on averaging 95.4 MiB of gradients, at 2 GB/s or less" in found.message
    )
    assert of_rules(*slow, process=process | {"parameter_values": 1000}) is None
    assert of_rules(rank(0), rank(1), process=process) is None
    overlapped = of_rules(*slow, process=process, plan={"memory.on_oom": "fail"})
    assert overlapped is not None
    assert (overlapped.change, overlapped.severity) == ((), "high")


def test_uneven_memory_is_a_note() -> None:
    found = of_rules(rank(0, peak_gib=4.0), rank(1, peak_gib=7.0, gpu="1"), rank(2, peak_gib=4.1))
    assert found is not None
    assert (found.id, found.is_note, found.evidence["rank"]) == ("uneven_memory", True, 1)
    assert found.message.startswith("Rank 1 (GPU 1 of node-a) needs 7.00 GiB of memory, the others 4.05 GiB.")
    assert of_rules(rank(0, peak_gib=1.0), rank(1, peak_gib=1.4)) is None


def test_fsdp_waits_in_the_forward_pass_too() -> None:
    """So a long forward pass is no straggler's; batches that come late are."""
    fsdp = {"trainer.strategy": "fsdp"}
    assert of_rules(rank(0), rank(1, forward=45.0), plan=fsdp) is None
    late = of_rules(rank(0, forward=70.0, work_half_ms=90.0), rank(1, wait=41.0), plan=fsdp)
    assert late is not None
    assert (late.id, late.evidence["rank"]) == ("input_straggler", 1)
    large = of_rules(rank(0), rank(1, batch_mib=8.0), plan=fsdp)
    assert large is not None
    assert (large.id, large.evidence["rank"], large.gain and large.gain.low) == ("uneven_shares", 1, 1.0)


def test_buffers_of_rank_0_make_the_others_wait_in_their_forward_pass() -> None:
    found = of_rules(rank(0, wait=41.0), rank(1, forward=70.0), rank(2, forward=70.0))
    assert found is not None
    assert (found.id, found.evidence["rank"]) == ("input_straggler", 0)


def test_no_healthy_run_is_accused() -> None:
    assert of_rules(rank(0), rank(1)) is None
    assert of_rules(rank(0), rank(1, wait=5.0)) is None  # 4 % of a step
    assert of_rules(rank(0), rank(1, wait=11.0, work_half_ms=20.0, between_half_ms=20.0)) is None  # within noise
    assert of_rules(rank(0)) is None
    assert of_rules(rank(0), rank(1, step_ms=200.0, forward=130.0)) is None  # they do not step together
    spread = [rank(number, forward=30 + 3 * ((number * 37) % 64) / 64) for number in range(64)]
    assert of_rules(*spread) is None


def test_of_64_ranks_a_slow_machine_is_named_with_its_other_ranks() -> None:
    ranks = [rank(number, node=number // 32, wait=41.0 if 8 <= number < 16 else 1.0) for number in range(64)]
    found = of_rules(*ranks)
    assert found is not None
    assert (found.id, found.evidence["rank"]) == ("input_straggler", 8)
    assert "Nearly as slow: ranks 9, 10, 11, 12 and 3 more." in found.message


def test_ranks_that_left_early_or_have_no_figures() -> None:
    late = rank(1, wait=41.0, steps=100)
    assert of_rules(rank(0), late, rank(2, steps=3, wait=80.0)) is not None  # too few steps to compare
    assert of_rules(rank(0), rank(1, steps=3, wait=80.0)) is None
    old = {name: value for name, value in rank(1, wait=41.0).items() if name in _OF_OLD_RECORDS}
    found = of_rules({name: value for name, value in rank(0).items() if name in _OF_OLD_RECORDS}, old)
    assert found is not None
    assert "rank 1 (on node 0)" in found.message
    assert found.gain is not None
    assert found.gain.low == 1.0  # nothing is known about noise


_OF_OLD_RECORDS = (
    *("rank", "node", "gpu", "wait_frac", "copy_frac", "compute_frac", "host_frac", "step_ms_mean"),
    *("readiness_frac", "peak_gib"),
)


def test_a_straggler_comes_before_what_rank_0_alone_shows() -> None:
    """Rank 0 is the slow one: its waiting has a cause of its own, which is that of this rank alone."""
    evidence = of_ranks(
        rank(0, wait=41.0, build_ms=80.0), rank(1), loading={"build_ms_mean": 80.0, "cpu_frac": 0.1}, ceiling=1.6
    )
    found = [finding.id for finding in run_rules(evidence)]
    assert found[0] == "input_straggler"
    assert "too_few_workers" in found[1:]
