"""Time that passes between two steps."""

import numpy as np
import pytest

from tests.kit.evidence_of import evidence, walled
from wellfed.explain.diagnosis.rules.pause_rules import check_between_passes, check_between_steps
from wellfed.explain.diagnosis.rules.pause_rules import slow_callbacks as check
from wellfed.explain.diagnosis.run_rules import run_rules
from wellfed.run.watch.script_steps import GRAPHS, NO_LOADER
from wellfed.run.watch.torch_marks import COMPILED, NO_MODULE, UNTRAINED


def paused(places, ms, *, steps=120, log_every=50):
    host_ms = np.full(steps, 0.1)
    host_ms[places] += ms
    columns = {"host_ms": host_ms, "time_s": np.cumsum(host_ms + 10) / 1e3}
    mean = float(host_ms.mean())
    return evidence(steps=steps, host_ms=mean, columns=columns, config={"trainer": {"log_every_steps": log_every}})


def test_a_pause_behind_each_step_is_told_with_the_callbacks_that_there_are():
    found = check_between_steps(evidence(host_ms=6.0, plan={"callbacks": "ema, lr_monitor"}))
    assert found is not None
    assert found.message.startswith(
        "Between two steps 6 ms pass before the next begins, 37.5 % of the time: callbacks ("
    )
    assert "ema, lr_monitor" in found.message
    assert found.change == ()
    assert found.time_lost_frac == pytest.approx(0.375)


def test_the_class_and_the_hook_are_named_with_their_share():
    wall = walled(steps_s=4.0, callbacks={"Own.on_train_epoch_end": 5.5, "Ema.on_train_batch_end": 0.5})
    found = check(evidence(host_ms=6.0, wall=wall))
    assert found.message == "Own.on_train_epoch_end takes 55.0 % of the wall time of training, 5.5 s of 10.0 s."
    assert found.time_lost_frac == pytest.approx(0.6)


def test_several_that_take_as_long_are_named_with_their_own_shares():
    wall = walled(steps_s=5.0, callbacks={"A.on_fit_start": 3.0, "B.on_train_start": 2.0, "C.setup": 0.01})
    said = "A.on_fit_start 30.0 %, B.on_train_start 20.0 %: callbacks and hooks take 50.0 % of the wall time"
    assert check(evidence(wall=wall)).message.startswith(said)


def test_callbacks_that_were_measured_to_take_nothing_are_not_blamed_for_a_slow_loop():
    case = evidence(host_ms=6.0, wall=walled(steps_s=10.0, callbacks={"Ema.on_train_batch_end": 0.1}))
    assert check(case) is None
    assert check_between_steps(case) is None


def test_a_card_may_compute_beside_callbacks_within_the_steps():
    waits_for_it = walled(steps_s=6.0, callbacks={"A.on_train_batch_end": 4.0})
    assert check(evidence(copy_ms=0.1, ceiling=1.01, wall=waits_for_it)) is None
    assert check(evidence(copy_ms=0.1, ceiling=1.25, wall=waits_for_it)).time_lost_frac == pytest.approx(0.2)
    wall = walled(steps_s=5.0, callbacks={"A.on_train_batch_end": 4.0, "B.on_train_epoch_end": 1.0})
    assert check(evidence(copy_ms=0.1, ceiling=1.0, wall=wall)).time_lost_frac == pytest.approx(0.1)


def test_a_hook_that_waits_for_the_card_costs_what_the_card_stands_still_between_steps():
    """Without a ceiling. It reads the loss, so the host waits until the card has computed the step."""
    wall = walled(steps_s=2.0, callbacks={"PrintLoss.on_train_batch_end": 8.0})
    assert check(evidence(copy_ms=0.1, compute_ms=10.0, host_ms=0.2, wall=wall)) is None
    found = check(evidence(copy_ms=0.0, compute_ms=6.0, host_ms=4.0, wall=wall))
    assert found.time_lost_frac == pytest.approx(0.4)
    assert check(evidence(compute_ms=10.0, host_ms=0.2, wall=wall)).time_lost_frac == pytest.approx(0.8)  # on a CPU


def test_one_behind_every_tenth_step_is_told_with_how_often_it_comes():
    found = check_between_steps(paused(slice(10, None, 10), 60.0))
    assert found.message.startswith("Every 10 steps 60 ms pass")
    assert found.evidence["every_steps"] == 10


def test_short_pauses_of_the_machine_s_in_between_hide_it_not():
    case = paused(slice(10, None, 10), 60.0)
    host_ms = case.steps.column("host_ms").copy()
    host_ms[[3, 26, 44, 57, 59, 96]] += 4.0
    columns = {"host_ms": host_ms, "time_s": np.cumsum(host_ms + 10) / 1e3}
    assert check_between_steps(evidence(steps=120, host_ms=5.0, columns=columns)).evidence["every_steps"] == 10


@pytest.mark.parametrize(
    "case",
    [
        evidence(),
        evidence(host_ms=0.4, compute_ms=1.0),
        paused([3, 4, 17, 40, 44, 90, 91, 110], 60.0),
        paused([10, 20], 300.0),
        paused(slice(10, None, 10), 60.0, log_every=10),
        paused(slice(10, None, 10), 4.0),
    ],
)
def test_short_or_disorderly_pauses_and_those_of_logging_are_no_finding(case):
    assert check_between_steps(case) is None


def with_epochs(gaps_s, *, status="ok", trained_s=2.0, **phases):
    """Returns a run with a pause before each epoch but the first; each epoch has 10 steps of 10 ms."""
    steps = 10 * (len(gaps_s) + 1)
    times_s = np.full(steps, 0.0101)
    times_s[10::10] += gaps_s
    columns = {"epoch": np.repeat(np.arange(steps / 10), 10), "time_s": np.cumsum(times_s)}
    entries = {phase: {"total_s": total_s, "times": times} for phase, (total_s, times) in phases.items()}
    entries["train"] = {"total_s": trained_s, "times": 1}
    return evidence(steps=steps, columns=columns, status=status, phases=entries)


def test_work_before_each_epoch_is_found_with_its_length():
    found = check(with_epochs([0.1] * 6))
    assert "45.9 % of the wall time of training passed between epochs: 100 ms before each of 6 epochs" in found.message
    assert found.time_lost_frac == pytest.approx(0.6 / 1.307, rel=0.01)


def test_known_pauses_are_no_work_between_epochs():
    found = check(with_epochs([0.15] * 6, validate=(0.3, 6), trained_s=20.0))
    assert found.evidence["pause_s"] == pytest.approx(0.1, rel=0.01)
    assert check(with_epochs([0.06] * 6, validate=(0.3, 6), trained_s=20.0)) is None


@pytest.mark.parametrize(
    "case",
    [
        with_epochs([0.0] * 6),
        with_epochs([0.01] * 6),
        with_epochs([2.0, 0.0, 0.0, 0.0, 0.0, 0.0]),
        with_epochs([0.2, 0.0, 0.2, 0.0, 0.2, 0.0, 0.2], validate=(0.6, 3), trained_s=20.0),
        with_epochs([0.1] * 4),
        with_epochs([0.1] * 6, status="running"),
        with_epochs([0.1] * 6, validate=(2.0, 6)),
    ],
    ids=["none", "short", "one", "every other epoch", "few epochs", "a run that goes on", "frequent validation"],
)
def test_one_pause_and_pauses_with_a_reason_are_no_work_between_epochs(case):
    assert check(case) is None


def test_a_killed_script_has_no_phases_so_its_pauses_may_be_validations():
    case = with_epochs([0.1] * 6, status="killed")
    case.record.phases.clear()
    assert check(case) is None


def with_passes(case, forward, backward, optimizer):
    case.record.time.update(forward_frac=forward, backward_frac=backward, optimizer_frac=optimizer)
    return case


def test_time_between_the_passes_is_found_with_what_may_run_then():
    found = check_between_passes(with_passes(evidence(), 0.3, 0.3, 0.05))
    text = "3.43 ms of each step, 34.0 %, pass between forward pass, backward pass and optimizer"
    assert found.message.startswith(text)
    assert found.gain.low == 1


@pytest.mark.parametrize("unseen", [COMPILED, UNTRAINED, NO_MODULE, GRAPHS])
def test_passes_that_could_not_be_told_apart_from_others_are_no_callbacks(unseen):
    events = [{"kind": "unseen", "step": 1, "time_s": 1.0, "message": unseen}]
    case = with_passes(evidence(host_ms=6.0, events=events), 0.2, 0.1, 0.05)
    assert check_between_passes(case) is None
    assert (check_between_steps(case) is None) == (unseen != GRAPHS)
    assert check_between_steps(with_passes(case, 0.0, 0.1, 0.05)) is not None, "then compute begins with the batch"
    events[0]["message"] = NO_LOADER
    case = with_passes(evidence(host_ms=6.0, events=events), 0.2, 0.1, 0.05)
    assert check_between_passes(case) is not None
    assert check_between_steps(case) is not None


@pytest.mark.parametrize(
    "case",
    [
        evidence(),
        with_passes(evidence(), 0.4, 0.4, 0.1),
        with_passes(evidence(), 0.0, 0.4, 0.1),  # a compiled model, whose forward pass is not seen
        with_passes(evidence(wall=walled(steps_s=1.0)), 0.3, 0.3, 0.05),
    ],
)
def test_passes_that_take_the_time_or_were_not_seen_are_no_finding(case):
    assert check_between_passes(case) is None


def test_time_between_passes_and_between_epochs_are_two_findings_of_one_basis():
    case = with_passes(with_epochs([0.1] * 6), 0.2, 0.2, 0.05)
    epochs, passes = (found for found in run_rules(case) if found.id == "slow_callbacks")
    assert epochs.steps_frac is None
    assert passes.steps_frac == pytest.approx(case.wall.steps_frac)
    assert passes.time_lost_frac == pytest.approx(passes.gain.lost_frac * case.wall.steps_frac)
