"""The rank that the others wait for is named, with its cause, the gain, and the override where one helps."""

from typing import Any

import numpy as np
import pytest

from tests.kit.rank_evidence import of_ranks, rank
from wellfed.explain.diagnosis.finding import Finding
from wellfed.explain.diagnosis.run_rules import OF_RANKS, run_rules
from wellfed.observe.telemetry.machines import HOST

ON_CARDS = {"0": {"sm_clock_mhz": {"mean": 1980.0}, "heat_limited": {"mean": 0.0}}}
FSDP = {"trainer.strategy": "fsdp"}
PROCESS = {"torch_threads": 1, "parameter_tensors": 4, "parameter_values": 25_000_000, "busy_threads": []}


def all_of(*ranks: dict[str, Any], **given: Any) -> list[Finding]:
    """Returns the findings of the rules on ranks."""
    evidence = of_ranks(*ranks, **given)
    return [finding for rule in OF_RANKS if (finding := rule(evidence)) is not None]


def of_rules(*ranks: dict[str, Any], **given: Any) -> Finding | None:
    """Returns the only finding of the rules on ranks."""
    found = all_of(*ranks, **given)
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
        "fast (1.63 to 1.71), predicted."
    )


def test_of_two_ranks_the_other_one_is_named() -> None:
    found = of_rules(rank(0), rank(1, node=1, gpu="node1/12", wait=41.0))
    assert found is not None
    assert found.text.startswith("Rank 0 waits for rank 1 (GPU 12 of node-b): in each step")


@pytest.mark.parametrize(
    ("more", "is_advised"),
    [
        ({}, True),
        ({"machine_cores": 7.5}, False),
        ({"cpu_quota_cores": 2.0}, False),
        ({"cpu_quota_cores": None}, False),
        ({"build_ms": 5000.0, "build_cpu_frac": 0.0}, False),  # 100 workers
    ],
)
def test_workers_are_advised_within_idle_cores_and_quota(more: dict[str, Any], is_advised: bool) -> None:
    found = of_rules(rank(0), rank(1, **{"wait": 41.0, "build_ms": 80.0, "build_cpu_frac": 1.0} | more))
    assert found is not None
    assert found.change == (("loader.num_workers=3",) if is_advised else ())
    if not is_advised:
        assert found.text.endswith("Without it, about 1.67 times as fast (1.63 to 1.71), predicted.")


def test_a_slow_forward_pass_without_a_cause_costs_up_to_a_slow_backward_pass_more() -> None:
    found = of_rules(rank(0), rank(1, forward=45.0))
    assert found is not None
    assert (found.id, found.evidence["rank"]) == ("compute_straggler", 1)
    assert "its forward pass takes 45 ms of a step, that of rank 0 30 ms" in found.message
    assert found.gain is not None
    backward_ms = 100 - 1 - 45 - 5 - 4
    assert found.gain.low == pytest.approx(100 / (100 - 15 + 2**0.5), rel=1e-6)
    assert found.gain.high == pytest.approx(100 / (100 - 15 - backward_ms / 3 - 2**0.5), rel=1e-6)


def test_a_long_average_of_gradients_counts_as_no_slow_backward_pass() -> None:
    found = of_rules(rank(0, step_ms=500.0), rank(1, step_ms=500.0, forward=60.0))
    assert found is not None
    assert found.gain is not None
    assert found.gain.high == pytest.approx(500 / (500 - 30 - 3 * 30 - 2**0.5), rel=1e-6)


def test_a_slow_copy_on_one_rank() -> None:
    plan = {"loader.pin_memory": False, "loader.device_prefetch": 0}
    found = on_cards({"copy": 30.0}, plan=plan)
    assert found is not None
    assert (found.id, found.change) == ("copy_straggler", ("loader.pin_memory=true", "loader.device_prefetch=2"))
    assert "rank 1 (GPU 1 of node-a): each step waits 30 ms for its copy to the GPU, that of rank 0 0 ms" in found.text
    assert "GB/s" in found.text
    kept = on_cards({"copy": 30.0}, plan={"loader.pin_memory": True, "loader.device_prefetch": 2})
    assert kept is not None
    assert (kept.change, "nvidia-smi topo -m" in kept.message) == ((), True)
    assert "GB/s" not in kept.text  # part of the copy is hidden
    alone = on_cards({"copy": 30.0}, plan=plan | {"loader.num_workers": 0})
    assert alone is not None
    assert alone.change == ("loader.pin_memory=true",)  # nothing builds batches that could be copied ahead


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
    ("figures", "said"),
    [
        ({"heat_limited": 0.6, "sm_clock_mhz": 1200.0}, "held down by heat in 60.0 % of the readings, at 1200 MHz"),
        ({"power_limited": 0.6, "sm_clock_mhz": 1400.0}, "held down by its power limit in 60.0 % of the readings"),
        ({"sm_clock_mhz": 1400.0}, "its GPU runs at 1400 MHz, that of rank 0 at 1980 MHz"),
    ],
)
def test_a_card_that_is_slow(figures: dict[str, float], said: str) -> None:
    for plan in ({}, FSDP):
        found = on_cards({"forward": 45.0, "optimizer": 8.0}, plan=plan, **cards(**figures))
        assert found is not None
        assert (found.id, found.evidence["rank"], found.evidence["gpu"]) == ("slow_gpu", 1, "1")
        assert said in found.message
        assert (", so its forward pass takes 45 ms of a step, that of rank 0 30 ms." in found.message) == (not plan)


def test_a_card_that_got_hot_in_the_first_steps_is_named_though_the_interval_of_all_steps_is_wide() -> None:
    hot = {"forward": 45.0, "work_half_ms": 30.0}
    found = on_cards({**hot, "optimizer": 8.0}, **cards(heat_limited=0.9, sm_clock_mhz=1000.0))
    assert found is not None
    assert (found.id, found.evidence["rank"]) == ("slow_gpu", 1)
    assert on_cards(hot, **cards(heat_limited=0.9, sm_clock_mhz=1000.0)) is None  # its optimizer takes no longer


@pytest.mark.parametrize("figures", [{"sm_clock_mhz": 1800.0}, {"power_limited": 0.6}, {"heat_limited": 0.9}])
def test_a_card_that_explains_too_little_is_not_the_cause(figures: dict[str, float]) -> None:
    found = on_cards({"forward": 45.0}, **cards(**figures))
    assert found is not None
    assert found.id == "compute_straggler"


def test_memory_that_other_processes_hold_is_a_remark() -> None:
    holder = {"pid": 1, "name": "x", "memory_gib": 9.0}
    machine = {"gpus": [{"index": 0}, {"index": 1, "holders": [holder]}]}
    found = on_cards({"forward": 45.0}, machine=machine, **cards(sm_clock_mhz=1980.0))
    assert found is not None
    assert found.id == "compute_straggler"
    assert "Other processes held 9.00 GiB of its GPU when the run began, and may compute on it." in found.message


def test_with_fsdp_a_clock_counts_beside_the_middle_of_the_others_and_with_a_slow_optimizer() -> None:
    def of_clocks(*clocks: float, **slow: float) -> Finding | None:
        gpus = {str(number): {"sm_clock_mhz": {"mean": clock}} for number, clock in enumerate(clocks)}
        ranks = [rank(n, gpu=str(n), **(slow if clock == min(clocks) else {})) for n, clock in enumerate(clocks)]
        return of_rules(*ranks, plan=FSDP, gpus=gpus)

    found = of_clocks(1980.0, 1980.0, 1200.0, 1980.0, optimizer=8.0)
    assert found is not None
    assert (found.id, found.evidence["rank"]) == ("slow_gpu", 2)
    assert of_clocks(1980.0, 1980.0, 1200.0, 1980.0) is None
    assert of_clocks(1980.0, 1200.0, 1200.0, 1200.0, optimizer=8.0) is None  # one card is quick
    assert of_clocks(1900.0, 1850.0, 2100.0, 1880.0, optimizer=8.0) is None  # one is quicker than the others


@pytest.mark.parametrize(
    ("second", "said"),
    [
        (
            {"forward": 60.0, "core_wait_frac": 0.3, "machine_cores": 4.0},
            "other programs take 3.0 of the 8 cores of its machine, and it was ready to run and had no core for 30.0 % "
            "of the time, rank 0 for 0.0 %, so its forward pass takes 60 ms of a step, that of rank 0 30 ms. End what",
        ),
        ({"forward": 60.0, "core_wait_frac": 0.3}, "Its data workers, another program on its core or"),
        ({"forward": 60.0, "machine_cores": 7.9}, "other programs take 6.9 of the 8 cores of its machine"),
        ({"wait": 31.0, "iowait_cores": 1.5}, "1.5 cores of its machine wait for its disk, 0.0 on the machine of"),
    ],
)
def test_a_machine_without_a_core_or_a_disk(second: dict[str, float], said: str) -> None:
    found = of_rules(rank(0), rank(1, node=1, **second))
    assert found is not None
    assert (found.id, found.evidence["rank"], found.evidence["host"]) == ("slow_machine", 1, "node-b")
    assert said in found.message
    assert ("End what else runs" in found.message) == ("other programs" in said)


def test_two_nodes_on_one_machine_share_its_cores() -> None:
    busy = {"machine_cores": 7.9, "cores": 3.9}
    found = of_rules(rank(0, **busy), rank(1, node=1, forward=60.0, **busy) | {"host": "node-a"})
    assert found is not None
    assert found.id == "compute_straggler"
    curves = {HOST: {"others_cpu_pct": np.full(20, 450.0)}}
    for host, taken in (("node-a", 0.6), ("node-b", 4.5)):
        ranks = rank(0), rank(1, node=1, cores=3.9) | {"host": host}
        telemetry = of_ranks(*ranks, launch={"by": "torchrun", "job": None, "attempt": 0}, curves=curves).telemetry
        assert telemetry.mean_others_cores == pytest.approx(taken)


def test_a_stream_is_read_in_its_parts_at_most() -> None:
    found = of_rules(rank(0), rank(1, wait=41.0, build_ms=80.0), loading={"most_workers": 2})
    assert found is not None
    assert (found.id, found.change) == ("input_straggler", ())


def test_cores_of_a_rank_that_are_unknown_are_not_those_of_other_programs() -> None:
    busy = {"machine_cores": 7.9, "cores": 3.9}
    unknown = rank(1, node=1, forward=60.0, **busy | {"cores": None}) | {"host": "node-a"}
    found = of_rules(rank(0, **busy), unknown)
    assert found is not None
    assert found.id == "compute_straggler"
    given = {"curves": {HOST: {"others_cpu_pct": np.full(20, 450.0)}}, "plan": {"trainer.devices": 2}}
    given["launch"] = {"by": "torchrun", "job": None, "attempt": 0}
    assert of_ranks(rank(0), unknown, **given).telemetry.mean_others_cores is None
    assert of_ranks(rank(0), **given).telemetry.mean_others_cores is None  # rank 1 has not reported yet


def test_some_batches_of_one_rank_that_are_larger_by_chance_do_not_explain_it() -> None:
    cards_apart = cards(sm_clock_mhz=1500.0, heat_limited=0.5)
    noisy = {"forward": 40.0, "batch_mib": 4.6, "batch_half_mib": 0.8}
    found = on_cards(noisy, **cards_apart)
    assert found is not None
    assert found.id == "slow_gpu"


def test_steps_whose_work_varies_on_each_rank_are_no_slow_link_for_sure() -> None:
    found = of_rules(*[rank(number, forward=10.0, work_half_ms=3.0) for number in range(8)], process=PROCESS)
    assert found is not None
    assert (found.id, found.change, found.is_note) == ("slow_link", (), True)
    assert "all wait for the longest" in found.message


def test_a_slow_link_makes_all_ranks_wait_alike() -> None:
    slow = [rank(number, forward=10.0) for number in range(2)]
    found = of_rules(*slow, process=PROCESS)
    assert found is not None
    assert (found.id, found.change, found.severity) == ("slow_link", ("memory.on_oom=fail",), "medium")
    assert found.gain is not None
    assert found.gain.low == 1.0
    said = "up to 50 ms of each step of 100 ms (50.0 %) on averaging 95.4 MiB of gradients (2 GB/s)"
    assert said in found.message
    half = of_rules(*slow, process=PROCESS | {"parameter_bytes": 50_000_000})
    assert half is not None
    assert "averaging 47.7 MiB of gradients (1 GB/s)" in half.message
    assert of_rules(*slow, process=PROCESS | {"parameter_values": 1000}) is None
    assert of_rules(rank(0), rank(1), process=PROCESS) is None
    overlapped = of_rules(*slow, process=PROCESS, plan={"memory.on_oom": "fail"})
    assert overlapped is not None
    assert (overlapped.change, overlapped.severity, overlapped.gain) == ((), "info", None)


def test_hooks_between_the_phases_are_no_slow_link() -> None:
    ranks = [rank(number, forward=10.0) for number in range(2)]
    for one in ranks:
        one["backward_frac"] -= 0.4
    assert of_rules(*ranks, process=PROCESS) is None


def test_a_slow_link_is_seen_beside_a_straggler() -> None:
    found = all_of(rank(0, forward=10.0), rank(1, forward=10.0, wait=7.0), process=PROCESS)
    assert [one.id for one in found] == ["input_straggler", "slow_link"]
    assert found[1].evidence["reduction_ms"] == pytest.approx(44.0)  # in which the straggler waits for no rank


def test_uneven_memory_is_a_note() -> None:
    found = of_rules(rank(0, peak_gib=4.0), rank(1, peak_gib=7.0, gpu="1"), rank(2, peak_gib=4.1))
    assert found is not None
    assert (found.id, found.is_note, found.evidence["rank"]) == ("uneven_memory", True, 1)
    assert found.message.startswith("Rank 1 (GPU 1 of node-a) needs 7.00 GiB of memory, the others 4.05 GiB.")
    assert of_rules(rank(0, peak_gib=1.0), rank(1, peak_gib=1.4)) is None


def test_fsdp_waits_in_the_forward_pass_too() -> None:
    """So a long forward pass is no straggler's; batches that come late are."""
    assert of_rules(rank(0), rank(1, forward=45.0), plan=FSDP) is None
    late = of_rules(rank(0, forward=70.0, work_half_ms=90.0), rank(1, wait=41.0), plan=FSDP)
    assert late is not None
    assert (late.id, late.evidence["rank"]) == ("input_straggler", 1)


def test_with_fsdp_larger_batches_are_a_note_beyond_their_noise() -> None:
    large = of_rules(rank(0), rank(1, batch_mib=8.0), plan=FSDP)
    assert large is not None
    assert (large.id, large.evidence["rank"], large.severity, large.gain) == ("uneven_shares", 1, "info", None)
    assert large.text.startswith("The batches of rank 1 (on node-a) have 8.0 MiB, those of rank 0 4.0 MiB on average")
    assert of_rules(rank(0), rank(1, batch_mib=8.0, batch_half_mib=4.0), plan=FSDP) is None
    assert of_rules(rank(0), rank(1, batch_mib=8.0, batch_half_mib=None), plan=FSDP) is None
    assert of_rules(rank(0), rank(1, batch_mib=8.0), rank(2, batch_mib=8.0), plan=FSDP) is None
    more = of_rules(rank(0), rank(1, samples=48.0), rank(2), plan=FSDP)
    assert more is not None
    assert "48 samples, those of rank 0 32" in more.text


def test_buffers_of_rank_0_make_the_others_wait_in_their_forward_pass() -> None:
    found = of_rules(rank(0, wait=41.0), rank(1, forward=70.0), rank(2, forward=70.0))
    assert found is not None
    assert (found.id, found.evidence["rank"]) == ("input_straggler", 0)


def test_a_rank_that_waits_between_its_steps_for_a_pause_of_rank_0_is_not_accused() -> None:
    """Rank 0 alone validates, which is part of none of its steps. Rank 1 meets it at a barrier after each."""
    at_barrier = {"step_ms": 115.0, "host": 4.0 + 15.0}
    assert of_rules(rank(0), rank(1, **at_barrier)) is None
    found = of_rules(rank(0), rank(1, **at_barrier, wait=1.0 + 20.0))
    assert found is not None
    assert (found.id, found.evidence["rank"]) == ("input_straggler", 1)
    assert found.evidence["lost_ms"] == pytest.approx(20.0)


def test_no_healthy_run_is_accused() -> None:
    assert of_rules(rank(0), rank(1)) is None
    assert of_rules(rank(0), rank(1, wait=5.0)) is None  # 4 % of a step
    assert of_rules(rank(0), rank(1, wait=11.0, work_half_ms=20.0, between_half_ms=20.0)) is None  # within noise
    assert of_rules(rank(0, work_half_ms=20.0, between_half_ms=20.0), rank(1, wait=11.0)) is None
    assert of_rules(rank(0)) is None
    assert of_rules(rank(0), rank(1, step_ms=200.0, forward=130.0)) is None  # they do not step together
    spread = [rank(number, forward=30 + 3 * ((number * 37) % 64) / 64) for number in range(64)]
    assert of_rules(*spread) is None


@pytest.mark.parametrize("num", [3, 4, 5])
def test_one_quick_rank_accuses_none_of_the_others(num: int) -> None:
    assert of_rules(*(rank(number, wait=1.0 if number == 0 else 41.0) for number in range(num))) is None


def test_half_of_the_ranks_are_slow_only_with_a_machine_of_their_own() -> None:
    waits = (1.0, 1.0, 41.0, 41.0)
    assert of_rules(*(rank(number, wait=wait) for number, wait in enumerate(waits))) is None
    found = of_rules(*(rank(number, wait=wait, node=number // 2) for number, wait in enumerate(waits)))
    assert found is not None
    assert "All other ranks wait for rank 2 (on node-b)" in found.text
    assert "Nearly as slow: rank 3." in found.text


def test_without_an_interval_no_rank_is_accused() -> None:
    unknown = {"work_half_ms": None, "between_half_ms": None}
    assert of_rules(rank(0), rank(1, wait=41.0, **unknown)) is None
    assert of_rules(rank(0, **unknown), rank(1, wait=41.0)) is None
    found = of_rules(rank(0, work_half_ms=None), rank(1, wait=41.0))  # phases were hardly timed
    assert found is not None
    assert found.id == "input_straggler"


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
    old = [
        {name: value for name, value in one.items() if name in _OF_OLD_RECORDS} for one in (rank(0), rank(1, wait=41.0))
    ]
    assert of_rules(*old) is None  # nothing is known about noise


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
