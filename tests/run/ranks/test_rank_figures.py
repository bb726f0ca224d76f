"""The figures of all ranks come to rank 0 without waiting, and those of ranks that have ended stay there."""

import time

import pytest
import torch

from tests.run.ranks.test_exchange import FAILED, joined, on_all
from wellfed.batches import Delivery
from wellfed.observe.timing.step_clock import StepRow
from wellfed.run.outcome import RankEnded
from wellfed.run.ranks import rank_figures
from wellfed.run.ranks.coordination import OtherRanks
from wellfed.run.ranks.rank_figures import BatchSizes, RankFigures, half_widths_ms
from wellfed.units import MIB


def rows(wait_ms=1.0, steps=60, **more):
    """Steps of 100 ms."""
    given = {"forward_ms": 30.0, "backward_ms": 50.0 - wait_ms, "optimizer_ms": 5.0} | more
    return [
        StepRow(number, number / 10, 0, 64, 32, 1, wait_ms, None, 90 - wait_ms, 10.0, wait_ms, number < 3, **given)
        for number in range(steps)
    ]


def figures_of(exchanges, recorded):
    """Of each rank, which waits 10 ms longer than the one before."""
    return [
        RankFigures(
            {"rank": rank, "node": rank, "gpu": None},
            OtherRanks(rank, exchange=exchange),
            rows=lambda rank=rank: rows(1.0 + 10 * rank),
            peak_gib=lambda: 1.5,
            record=lambda found, rank=rank: recorded.setdefault(rank, []).append(found),
        )
        for rank, exchange in enumerate(exchanges)
    ]


def until(condition):
    until_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.01)


def test_a_report_is_left_once_it_is_due_and_waits_for_nobody(exchanges, monkeypatch):
    recorded = {}
    of_ranks = figures_of(joined(exchanges), recorded)
    assert not any(one.stepped() for one in of_ranks)
    monkeypatch.setattr(rank_figures, "EVERY_S", 0.0)
    for one in of_ranks:
        one.begin()
    assert of_ranks[0].stepped()  # the others have left nothing yet
    assert [one["rank"] for one in recorded[0][-1]] == [0]
    assert [one.stepped() for one in of_ranks[1:]] == [False, False]  # rank 0 alone records

    def is_whole():
        of_ranks[0].record_latest()
        return len(recorded[0][-1]) == 3

    until(is_whole)
    assert [one["wait_frac"] for one in recorded[0][-1]] == [pytest.approx(wait) for wait in (0.01, 0.11, 0.21)]
    first = recorded[0][-1][0]
    assert first["steps"] == 57
    assert (first["forward_frac"], first["backward_frac"]) == (pytest.approx(0.3), pytest.approx(0.49))
    assert first["peak_gib"] == 1.5
    assert 0 <= first["cores"] <= first["host_cores"]
    assert first["core_wait_frac"] >= 0


def test_at_the_end_all_ranks_have_the_figures_of_all(exchanges):
    recorded = {}
    of_ranks = figures_of(joined(exchanges), recorded)
    on_all(of_ranks, lambda one: one.compare())
    assert [[one["rank"] for one in recorded[rank][-1]] for rank in range(3)] == [[0, 1, 2]] * 3


def test_the_last_figures_of_a_rank_that_has_failed_stay(exchanges):
    recorded = {}
    of_ranks = figures_of(joined(exchanges), recorded)
    of_ranks[2].report()
    exchanges[2].outcomes.report(FAILED)
    with pytest.raises(RankEnded):
        of_ranks[0].compare()
    assert recorded == {}
    until(of_ranks[0].record_latest)
    until(lambda: of_ranks[0].record_latest() and len(recorded[0][-1]) == 2)
    assert [one["rank"] for one in recorded[0][-1]] == [0, 2]


def test_a_single_rank_reports_nothing():
    alone = RankFigures(None, OtherRanks(), rows=rows, peak_gib=lambda: None, record=pytest.fail)
    alone.report()
    alone.compare()
    assert (alone.stepped(), alone.record_latest(), alone.on_batch) == (False, False, None)


def test_batches_are_counted_and_some_of_them_measured():
    sizes = BatchSizes()
    assert (sizes.samples, sizes.batch_mib) == (None, None)
    for number in range(16):
        wide = 2.0 if number % 8 == 0 else 1.0
        batch = torch.zeros(4, int(wide * MIB) // 16)
        sizes.add(Delivery(batch, epoch=0, index=number, total=8, is_padding=number == 15))
    assert sizes.samples == 60 / 16
    assert sizes.batch_mib == pytest.approx(2.0)


def work_half_ms(found):
    return half_widths_ms(found)["work_half_ms"]


def test_the_interval_is_that_of_own_work():
    assert work_half_ms(rows(steps=30)) is None
    assert work_half_ms(rows()) == pytest.approx(0.0, abs=1e-9)
    uneven = [row._replace(wait_ms=row.wait_ms + 10 * (row.step % 2)) for row in rows()]
    half_ms = work_half_ms(uneven)
    assert half_ms is not None
    assert 0 < half_ms < 5
    waiting = [row._replace(backward_ms=10.0 + 80 * (row.step % 2)) for row in rows()]
    assert work_half_ms(waiting) == pytest.approx(0.0, abs=1e-9)  # in a backward pass ranks wait for others
    forward = [row._replace(forward_ms=10.0 + 80 * (row.step % 2)) for row in rows()]  # FSDP waits there
    assert half_widths_ms(forward)["between_half_ms"] == pytest.approx(0.0, abs=1e-9)
    on_card = [row._replace(copy_ms=1.0 + row.step % 2) for row in rows()]  # no phase was timed on the card
    assert (work_half_ms(on_card) or 0) > 0
    timed = [row._replace(device_forward_ms=30.0 + row.step % 8) for row in on_card[:12]] + on_card[12:]
    assert (work_half_ms(timed) or 0) > (work_half_ms(on_card) or 0)
