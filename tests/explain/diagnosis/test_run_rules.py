"""The verdict on a whole run, the order of findings, and the notes on how certain they are."""

import importlib
import inspect
import pkgutil

import numpy as np
import pytest

from tests.kit.evidence_of import evidence, walled
from wellfed.explain.diagnosis import rules
from wellfed.explain.diagnosis import run_rules as module
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import Finding, Gain
from wellfed.explain.diagnosis.rules import verdict_rules
from wellfed.explain.diagnosis.run_rules import run_rules
from wellfed.explain.diagnosis.script_words import NO_LOADER, NO_STEP, OTHER_THREAD
from wellfed.observe.telemetry.series import HOST
from wellfed.record.entries import RunRecord

VERDICTS = {"unknown", "busy_machine", "too_few_steps", "machine_was_slower", "unexplained", "steps_varied"}
STARVED = {"plan": {"loader.num_workers": 0, "loader.backend": "inline"}, "loading": {"build_ms_mean": 30.0}}
BUILT = {"build_ms_mean": 30.0, "cpu_frac": 0.95}


def ids(given):
    return [finding.id for finding in run_rules(given)]


def with_interval(given, share):
    rate = given.record.throughput["samples_per_s"]
    given.record.throughput["ci95"] = [(1 - share) * rate, (1 + share) * rate]
    return given


def shared(own, others, **more):
    curve = {"cpu_pct": np.full(20, own), "others_cpu_pct": np.full(20, others)}
    return evidence(**{"cores": 2.0, "curves": {HOST: curve}, "wait_ms": 30.0, "ceiling": 4.0, **STARVED, **more})


def test_every_rule_is_asked():
    found = set()
    for one in pkgutil.walk_packages(rules.__path__, f"{rules.__name__}."):
        for name, function in inspect.getmembers(importlib.import_module(one.name), inspect.isfunction):
            if name[0] != "_" and function.__annotations__.get("return") == "Finding | None":
                found.add(function)
    asked = {*module.OF_EVENTS, *module.OF_STEPS}
    verdicts = {getattr(verdict_rules, name) for name in VERDICTS}
    assert found == asked | verdicts
    assert not asked & verdicts


def test_a_run_that_waits_for_nothing_is_fed():
    (found,) = run_rules(evidence(compute_ms=95.0, wait_ms=4.0, host_ms=1.0, ceiling=1.05))
    assert (found.id, found.severity) == ("healthy", "info")
    assert found.text == "95 % of each step computes on the CPU, 4 % waits: data is not the limit. 95 % of the ceiling."
    assert "on the CPU" not in run_rules(evidence(copy_ms=0.0))[0].text
    assert "As fast as with all data" in run_rules(evidence(ceiling=0.95))[0].text
    assert "ceiling" not in run_rules(evidence())[0].text


def test_a_fed_gpu_is_told_what_its_card_does():
    readings = {"util_pct": np.full(9, 99.0), "sm_active_pct": np.full(9, 43.0), "tensor_active_pct": np.full(9, 5.0)}
    (found, *_) = run_rules(evidence(copy_ms=0.0, curves={0: {**readings, "time_s": np.arange(9.0)}}))
    assert "43 %" in found.text
    assert "tensor cores 5 %" in found.text


HOOKS = ("Own.on_train_epoch_end", "Own.on_train_batch_start", "Own.on_before_optimizer_step", "OneCycleLR.step")


@pytest.mark.parametrize(
    ("wall", "verdict", "lost"),
    [
        (walled(steps_s=1.0, validation_s=19.0), "frequent_validation", 0.95),
        (walled(steps_s=8.5, validation_s=1.5), "frequent_validation", 0.15),
        (walled(steps_s=8.9, validation_s=1.1, start_s=2.0), "frequent_validation", 0.09),
        (walled(steps_s=8.9, checkpoint_s=1.1, end_s=2.0), "frequent_checkpoints", 0.0),
        (walled(steps_s=3.0, checkpoint_s=240.0), "frequent_checkpoints", 0.0),
        *((walled(steps_s=1.0, callbacks={hook: 9.0}), "slow_callbacks", 0.9) for hook in HOOKS),
        (walled(steps_s=8.0, epoch_end_s=2.0), "unexplained", 0.2),
        (walled(steps_s=8.5, checkpoint_s=0.9, validation_s=0.6), "healthy", 0.0),
        (walled(steps_s=95.0, validation_s=2.0, checkpoint_s=2.0, start_s=1.0), "healthy", 0.0),
        (walled(steps_s=8.0, start_s=3.0), "healthy", 0.0),
        (walled(steps_s=1.0, start_s=0.5, end_s=0.2), "healthy", 0.0),
    ],
)
def test_a_tenth_of_the_wall_time_beside_the_steps_is_the_verdict(wall, verdict, lost):
    events = [{"kind": "checkpoint", "step": 25 * number, "file": "last.ckpt"} for number in range(1, 5)]
    config = {"trainer": {"checkpoint_every_steps": 25}}
    first = run_rules(evidence(ceiling=1.02, wall=wall, events=events, config=config))[0]
    assert first.id == verdict
    assert first.time_lost_frac == pytest.approx(lost, abs=0.06)


@pytest.mark.parametrize(
    ("given", "cause"),
    [
        ({"wait_ms": 1.5, "ceiling": 1.06}, "wait_frac"),
        ({"host_ms": 2.0, "ceiling": 1.0, "wall": walled(steps_s=9.0)}, "between_frac"),
    ],
)
def test_a_tenth_of_the_time_that_no_rule_names_is_the_verdict(given, cause):
    first = run_rules(evidence(**given))[0]
    assert first.id == "unexplained"
    assert not first.is_note
    assert cause in first.evidence


def test_what_steps_lose_counts_for_their_share_of_the_wall_time():
    times = {"ceiling": 4.0, "wait_ms": 30.0, "phases": {"validate": {"total_s": 6.0, "times": 6}}}
    first, second = run_rules(evidence(wall=walled(steps_s=4.0, validation_s=6.0), **times, **STARVED))
    assert (first.id, second.id) == ("frequent_validation", "loading_in_main_process")
    assert second.time_lost_frac == pytest.approx(second.gain.lost_frac)


@pytest.mark.parametrize(("validation_s", "is_said"), [(1.5, True), (0.5, False)])
def test_a_gain_of_all_of_training_is_told_from_one_of_the_rate_which_is_of_steps(validation_s, is_said):
    wall = walled(steps_s=8.5, validation_s=validation_s)
    first = run_rules(evidence(ceiling=4.0, wait_ms=30.0, wall=wall, **{**STARVED, "loading": BUILT}))[0]
    assert "times as fast" in first.expected
    assert ("for all of training, predicted" in first.text) is is_said


def test_a_long_start_hides_no_waiting():
    times = {"wait_ms": 6.0, "compute_ms": 10.0, "host_ms": 0.0, "wall": walled(steps_s=4.0, start_s=20.0)}
    first = run_rules(evidence(**times, **STARVED))[0]
    assert first.id == "loading_in_main_process"
    assert first.time_lost_frac == pytest.approx(first.gain.lost_frac)
    unnamed = run_rules(evidence(**times, plan={"loader.num_workers": 4}, loading={"build_ms_mean": 1.0}))[0]
    assert unnamed.id == "unexplained"
    assert unnamed.evidence["wait_frac"] == pytest.approx(6 / 16)
    assert unnamed.time_lost_frac == pytest.approx(6 / 16)


def test_data_is_never_said_not_to_be_the_limit_of_steps_that_wait():
    parts = {"validation_s": 0.9, "checkpoint_s": 0.9, "epoch_end_s": 0.9, "logging_s": 0.9, "other_s": 0.9}
    wall = walled(steps_s=5.5, **parts)
    (first, *_) = run_rules(evidence(wait_ms=1.5, ceiling=1.05, wall=wall))
    assert first.id == "healthy"
    assert "not the limit" not in first.text
    assert "steps take 55.0 %" in first.text


@pytest.mark.parametrize("message", [NO_LOADER, OTHER_THREAD])
def test_a_script_whose_data_was_not_seen_is_told_so(message):
    events = [{"kind": "unseen", "step": 1, "time_s": 1.0, "message": message}]
    (first, *_) = run_rules(evidence(events=events))
    assert first.id == "healthy"
    assert message.rstrip(".") in first.text
    assert "not the limit" not in first.text
    assert "0 % waits" not in first.text


def test_compute_of_several_ranks_may_be_waiting_for_others():
    assert "or waits for other ranks" in run_rules(evidence(plan={"trainer.devices": 2}))[0].text


def test_other_programs_take_the_gain_and_never_the_verdict():
    free, busy = run_rules(shared(100.0, 0.0)), run_rules(shared(20.0, 180.0))
    assert free[0].gain is not None
    assert [one.id for one in busy] == [free[0].id, "busy_machine"]
    assert busy[0].change
    assert busy[0].gain is None
    assert busy[1].is_note
    assert busy[1].evidence["others_cores"] == pytest.approx(1.8)
    assert ids(shared(20.0, 180.0, wait_ms=1.0, ceiling=1.0)) == ["healthy", "busy_machine"]


def test_notes_beside_other_programs_have_no_gain_either(monkeypatch):
    note = Finding("small_batch", "", {}, gain=Gain(2.0, 1.0, 2.0), is_note=True)
    monkeypatch.setattr(module, "OF_STEPS", [lambda _: note])
    assert not any(one.gain for one in run_rules(shared(20.0, 180.0, wait_ms=1.0)))


@pytest.mark.parametrize(
    ("own", "others", "machine", "is_busy"),
    [
        (100.0, 40.0, {"cpu_quota_cores": 2.0}, False),
        (20.0, 100.0, {"cpu_quota_cores": 2.0}, False),
        (150.0, 3000.0, {"cpu_quota_cores": 2.0, "host_cores": 64}, False),
        (20.0, 6380.0, {"cpu_quota_cores": 2.0, "host_cores": 64}, True),
    ],
)
def test_a_machine_is_busy_if_the_cores_of_the_run_are_full_with_others(own, others, machine, is_busy):
    assert ("busy_machine" in ids(shared(own, others, machine=machine))) is is_busy


def test_a_run_that_needed_no_more_cores_is_not_disturbed():
    host = {"cpu_pct": 20.0, "rss_gib": 1.0, "core_wait_frac": 0.01}
    assert "busy_machine" in ids(shared(20.0, 180.0, host=host))
    untouched = shared(20.0, 180.0, host=host)
    untouched.record.time["wait_frac"] = 0.0
    assert "busy_machine" not in ids(untouched)


@pytest.mark.parametrize("ceiling", [None, 0.9, 1.05])
def test_a_rate_that_is_hardly_known_is_a_note_below_the_verdict(ceiling):
    first, note = run_rules(with_interval(evidence(ceiling=ceiling), 1.2))
    assert (first.id, note.id, note.is_note) == ("healthy", "steps_varied", True)
    assert ids(with_interval(evidence(wait_ms=30.0, ceiling=4.0, **STARVED), 0.6)) == [
        "loading_in_main_process",
        "steps_varied",
    ]
    assert ids(with_interval(evidence(), 0.4)) == ["healthy"]


def test_a_ceiling_out_of_reach_is_a_note_unless_the_rate_may_reach_it():
    assert ids(with_interval(evidence(ceiling=1.2), 0.2)) == ["healthy"]
    assert ids(evidence(compute_ms=10, ceiling=1.5, host_ms=0.5)) == ["healthy", "machine_was_slower"]


def test_the_costliest_comes_first_and_what_costs_little_after_fed(monkeypatch):
    found = [
        Finding("note", "", {}, is_note=True),
        Finding("little", "", {}, lost_frac=0.09),
        Finding("some", "", {}, lost_frac=0.1),
        Finding("much", "", {}, lost_frac=0.6),
    ]
    monkeypatch.setattr(module, "OF_EVENTS", [])
    monkeypatch.setattr(module, "OF_STEPS", [lambda _, one=one: one for one in found])
    assert ids(evidence(ceiling=1.0)) == ["much", "some", "little", "note"]
    event = Finding("data_parallel", "", {}, lost_frac=0.01)
    monkeypatch.setattr(module, "OF_EVENTS", [lambda _: event])
    assert ids(evidence(ceiling=1.0)) == ["much", "some", "data_parallel", "little", "note"]
    monkeypatch.setattr(module, "OF_STEPS", [lambda _: found[1]])
    assert ids(evidence(ceiling=1.0)) == ["data_parallel", "little"]
    monkeypatch.setattr(module, "OF_EVENTS", [])
    monkeypatch.setattr(module, "OF_STEPS", [lambda _, one=one: one for one in found[:2]])
    assert ids(evidence(ceiling=1.0)) == ["healthy", "little", "note"]


def test_a_straggler_counts_twice_and_not_more(monkeypatch):
    found = [Finding("straggler", "", {}, lost_frac=0.11), Finding("some", "", {}, lost_frac=0.2)]
    found.append(Finding("much", "", {}, lost_frac=0.6))
    monkeypatch.setattr(module, "OF_EVENTS", [])
    monkeypatch.setattr(module, "OF_STEPS", [lambda _, one=one: one for one in found])
    assert ids(evidence(ceiling=1.0)) == ["much", "straggler", "some"]


def test_an_event_is_a_verdict_whatever_it_costs():
    steps, values = 10 * np.arange(1.0, 9.0), np.array([2, 1.9, 2.1, 1.8, 2.0, 1.9, 95, 400])
    assert ids(evidence(losses=(steps, values)))[0] == "loss_blows_up"


def test_a_run_of_few_steps_is_too_short_and_has_its_shares():
    (found,) = run_rules(evidence(steps=3, wait_ms=10.0, host_ms=0.0))
    assert found.id == "too_few_steps"
    assert "3 steps" in found.text
    assert "50 % waits" in found.text
    assert "trainer.max_steps" in found.advice
    assert ids(evidence(steps=20)) == ["healthy"]
    assert ids(Evidence(RunRecord("run", status="killed"))) == ["too_few_steps"]
    (going_on,) = run_rules(Evidence(RunRecord("run", status="running")))
    assert "trainer.max_steps" not in going_on.text


@pytest.mark.parametrize("status", ["ok", "failed"])
def test_a_script_without_a_step_that_can_be_timed_is_not_told_to_run_longer(status):
    events = [{"kind": "unseen", "step": 0, "time_s": 1.0, "message": NO_STEP}]
    (found,) = run_rules(Evidence(RunRecord("run", status=status, config={"script": {}}, events=events)))
    assert found.id == "unknown"
    assert "nothing can be timed" in found.text
    assert "watch.batches(loader)" in found.advice
    assert "longer" not in found.text


def test_only_a_run_without_clocks_is_unknown():
    assert ids(evidence(time=None)) == ["unknown"]
    assert ids(Evidence(evidence(ceiling=1.01).record)) == ["healthy"]
