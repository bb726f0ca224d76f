"""Workers in the way of the steps."""

import pytest

from tests.kit.loader_evidence import fed_by
from wellfed.explain.diagnosis.rules.feeding_rules import workers_take_the_cpu as check
from wellfed.explain.diagnosis.run_rules import run_rules


def crowd(workers=8, *, ceiling=1.6, loader_pct=200.0, **loader):
    return fed_by(
        workers,
        build_ms=20.0,
        wait_ms=0.1,
        cpu_frac=0.6,
        cores=4.0,
        cpu_pct=390.0,
        loader_pct=loader_pct,
        ceiling=ceiling,
        loader=loader,
    )


def test_fewer_workers_are_advised_in_place_of_a_slower_machine():
    found = check(crowd())
    assert "8 workers share 4 cores with the steps and take 50.0 % of them" in found.message
    assert found.change == ("loader.num_workers=3",)
    assert found.gain.high == pytest.approx(1.6)
    assert [each.id for each in run_rules(crowd())] == ["workers_take_the_cpu"]


def test_few_workers_have_no_knob():
    assert check(crowd(workers=2)).change == ()
    assert check(crowd(workers=2, backend="own")).change == ()


def test_a_dataloader_of_the_user_s_is_built_anew():
    assert check(crowd(backend="own")).change == ("loader.backend=auto", "loader.num_workers=3")


@pytest.mark.parametrize("run", [crowd(ceiling=1.05), crowd(loader_pct=20.0), crowd(workers=0)])
def test_steps_as_short_as_in_the_ceiling_and_idle_workers_are_no_finding(run):
    assert check(run) is None
