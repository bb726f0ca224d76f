"""The figures of all ranks come to rank 0 without waiting, and those of ranks that have ended stay there."""

import time

import psutil
import pytest

from tests.run.ranks.test_exchange import FAILED, joined, on_all
from wellfed.observe.timing.readiness import StepTable
from wellfed.observe.timing.step_clock import StepRow
from wellfed.run.outcome import RankEnded
from wellfed.run.ranks import rank_figures
from wellfed.run.ranks.rank_figures import RankFigures, half_widths_ms


def rows(wait_ms=1.0, steps=60, **more):
    """Steps of 100 ms."""
    given = {"forward_ms": 30.0, "backward_ms": 50.0 - wait_ms, "optimizer_ms": 5.0} | more
    return [
        StepRow(number, number / 10, 0, 64, 32, 1, wait_ms, None, 90 - wait_ms, 10.0, wait_ms, number < 3, **given)
        for number in range(steps)
    ]


def figures_of(exchanges, recorded):
    """Returns those of each rank, which waits 10 ms longer than the one before."""
    return [
        RankFigures(
            {"rank": rank, "node": rank, "gpu": None},
            exchange,
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


def await_reports(exchanges, num):
    """Waits until so many ranks have left a report; the store does not confirm that it has got one."""
    until(lambda: sum(one is not None for one in exchanges[0].latest(rank_figures._KIND)) == num)


def test_ranks_report_now_and_then_and_rank_0_records_what_is_there(exchanges, monkeypatch):
    recorded = {}
    of_ranks = figures_of(joined(exchanges), recorded)
    assert not any(one.stepped() for one in of_ranks)
    assert exchanges[0].latest(rank_figures._KIND) == []  # 30 s have not passed
    monkeypatch.setattr(rank_figures, "EVERY_S", 0.0)
    for one in of_ranks:
        one._due_s = 0.0
    assert [one.stepped() for one in of_ranks[1:]] == [False] * 2  # rank 0 alone records
    await_reports(exchanges, 2)
    assert of_ranks[0].stepped()
    assert [one["wait_frac"] for one in recorded[0][-1]] == [pytest.approx(wait) for wait in (0.01, 0.11, 0.21)]
    first = recorded[0][-1][0]
    assert first["steps"] == 57
    assert (first["forward_frac"], first["backward_frac"]) == (pytest.approx(0.3), pytest.approx(0.49))
    assert first["peak_gib"] == 1.5


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), psutil.AccessDenied(1)])
def test_figures_that_cannot_be_read_do_not_end_the_training(exchanges, monkeypatch, caplog, error):
    def broken(*_):
        raise error

    recorded = {}
    of_ranks = figures_of(joined(exchanges), recorded)
    monkeypatch.setattr(of_ranks[1], "_peak_gib", broken)
    for one in of_ranks:
        one.report()
    await_reports(exchanges, 2)
    assert of_ranks[0].record_latest()
    assert [one["rank"] for one in recorded[0][-1]] == [0, 2]
    assert "The figures of this rank could not be read" in caplog.text
    on_all(of_ranks, lambda one: one.compare())
    assert [one["rank"] for one in recorded[0][-1]] == [0, 2]


def test_at_the_end_rank_0_has_the_figures_of_all(exchanges):
    recorded = {}
    of_ranks = figures_of(joined(exchanges), recorded)
    on_all(of_ranks, lambda one: one.compare())
    assert {rank: [one["rank"] for one in found[-1]] for rank, found in recorded.items()} == {0: [0, 1, 2]}


def test_the_last_figures_of_a_rank_that_has_failed_stay(exchanges):
    recorded = {}
    of_ranks = figures_of(joined(exchanges), recorded)
    of_ranks[2].report()
    exchanges[2].report(FAILED)
    with pytest.raises(RankEnded):
        of_ranks[0].compare()
    assert recorded == {}
    until(of_ranks[0].record_latest)
    until(lambda: of_ranks[0].record_latest() and len(recorded[0][-1]) == 2)
    assert [one["rank"] for one in recorded[0][-1]] == [0, 2]


def test_a_single_rank_reports_nothing_and_reads_nothing(monkeypatch):
    monkeypatch.setattr(rank_figures, "summarise", pytest.fail)
    alone = RankFigures({}, None, rows=rows, peak_gib=lambda: None, record=pytest.fail)
    alone.compare()
    assert (alone.stepped(), alone.record_latest()) == (False, False)


def half_ms(found):
    return half_widths_ms(StepTable.of(found).steady())


def work_half_ms(found):
    return half_ms(found)["work_half_ms"]


def test_the_interval_is_that_of_own_work():
    assert work_half_ms(rows(steps=7)) is None
    assert work_half_ms(rows()) == pytest.approx(0.0, abs=1e-9)
    uneven = [row._replace(wait_ms=row.wait_ms + 10 * (row.step % 2)) for row in rows()]
    assert 0 < (work_half_ms(uneven) or 0) < 5
    waiting = [row._replace(backward_ms=10.0 + 80 * (row.step % 2)) for row in rows()]
    assert work_half_ms(waiting) == pytest.approx(0.0, abs=1e-9)  # in a backward pass ranks wait for others
    forward = [row._replace(forward_ms=10.0 + 80 * (row.step % 2)) for row in rows()]  # FSDP waits there
    assert half_ms(forward)["between_half_ms"] == pytest.approx(0.0, abs=1e-9)
    on_card = [row._replace(copy_ms=1.0 + row.step % 2) for row in rows()]  # no phase was timed on the card
    assert work_half_ms(on_card) is None
    assert (half_ms(on_card)["between_half_ms"] or 0) > 0
    timed = [row._replace(device_forward_ms=30.0 + row.step % 8) for row in on_card[:12]] + on_card[12:]
    assert (work_half_ms(timed) or 0) > (half_ms(on_card)["between_half_ms"] or 0)
