"""What is said of a whole run: which finding comes first, and what is said where there is none."""

import importlib
import inspect
import pkgutil

import numpy as np
import pytest

from tests.kit.evidence_of import evidence, walled
from wellfed.explain.diagnosis import rules
from wellfed.explain.diagnosis import run_rules as judge_module
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import Finding
from wellfed.explain.diagnosis.rules import verdict_rules
from wellfed.explain.diagnosis.run_rules import run_rules
from wellfed.observe.telemetry.machines import HOST
from wellfed.record import RunRecord

VERDICTS = {"healthy", "unknown", "busy_machine", "too_few_steps", "machine_was_slower", "unexplained"}


def ids(given):
    return [finding.id for finding in run_rules(given)]


def widely_known(given):
    """The same with a rate that may be a fifth higher or lower."""
    rate = given.record.throughput["samples_per_s"]
    given.record.throughput["ci95"] = [0.8 * rate, 1.2 * rate]
    return given


def test_every_rule_is_asked():
    found = set()
    for module in pkgutil.walk_packages(rules.__path__, f"{rules.__name__}."):
        members = dict(inspect.getmembers(importlib.import_module(module.name), inspect.isfunction))
        found |= {
            function
            for name, function in members.items()
            if name[0] != "_" and function.__annotations__.get("return") == "Finding | None"
        }
    asked = {*judge_module.OF_EVENTS, *judge_module.OF_STEPS}
    verdicts = {getattr(verdict_rules, name) for name in VERDICTS}
    assert found == asked | verdicts
    assert not asked & verdicts


def test_a_run_at_its_ceiling_is_told_to_stop_tuning():
    (found,) = run_rules(evidence(ceiling=1.02))
    assert found.id == "healthy"
    assert found.severity == "info"
    assert found.text == "Stop tuning: 98.0 % of the ceiling, and nothing that costs time was found."
    (found,) = run_rules(widely_known(evidence(ceiling=1.2)))
    assert found.id == "unknown"
    assert "83.3 % of it, but the rate is known no better than 66.7 % to 100.0 % of it" in found.text
    assert "as fast as with all its data" in run_rules(evidence(ceiling=0.9))[0].text


HOOKS = ("Own.on_train_epoch_end", "Own.on_train_batch_start", "Own.on_before_optimizer_step", "OneCycleLR.step")


@pytest.mark.parametrize(
    ("wall", "cause", "said"),
    [
        (walled(steps_s=1.0, validation_s=19.0), "frequent_validation", "95.0 % of the wall time"),
        (walled(steps_s=3.0, checkpoint_s=240.0), "frequent_checkpoints", "98.8 % of the wall time"),
        *((walled(steps_s=1.0, callbacks={hook: 9.0}), "slow_callbacks", f"{hook} takes 90.0 %") for hook in HOOKS),
        (walled(steps_s=8.5, validation_s=1.5), "frequent_validation", "15.0 % of the wall time"),
        (walled(steps_s=8.5, checkpoint_s=0.9, validation_s=0.6), "frequent_checkpoints", "9.0 % of the wall time"),
        (walled(steps_s=8.0, epoch_end_s=2.0), "unknown", "The rest: ends of epochs 20.0 %"),
        (walled(steps_s=8.0, start_s=3.0), "slow_start", "3.0 s passed before the first step"),
    ],
)
def test_time_lost_between_steps_at_the_ceiling_is_named(wall, cause, said):
    events = [{"kind": "checkpoint", "step": 25 * number, "file": "last.ckpt"} for number in range(1, 5)]
    config = {"trainer": {"checkpoint_every_steps": 25}}
    found = run_rules(evidence(ceiling=1.02, wall=wall, events=events, config=config))
    assert [one.id for one in found] == [cause]
    assert said in found[0].text
    assert "Stop tuning" not in found[0].text


def test_a_gap_is_named_only_if_it_takes_most_of_what_is_missing():
    events = [{"kind": "checkpoint", "step": 100, "file": "last.ckpt"}]
    wall = walled(steps_s=87.0, validation_s=3.0, checkpoint_s=3.0, epoch_end_s=3.0, logging_s=4.0)
    found = run_rules(evidence(ceiling=1.02, wall=wall, events=events))
    assert [one.id for one in found] == ["unknown"]
    assert "The rest: logging 4.0 %" in found[0].text


def test_what_steps_lose_counts_for_their_share_of_the_wall_time():
    starved = {"plan": {"loader.num_workers": 0, "loader.backend": "inline"}, "loading": {"build_ms_mean": 30.0}}
    times = {"ceiling": 4.0, "wait_ms": 30.0, "phases": {"validate": {"total_s": 6.0, "times": 6}}}
    first, second = run_rules(evidence(wall=walled(steps_s=4.0, validation_s=6.0), **times, **starved))
    assert (first.id, second.id) == ("frequent_validation", "loading_in_main_process")
    assert "in its steps, 40.0 % of the wall time of training, predicted" in second.text
    assert second.time_lost_frac == pytest.approx(0.4 * second.gain.lost_frac)
    assert "in its steps" not in first.text
    (only,) = run_rules(evidence(wall=walled(steps_s=9.8, validation_s=0.2), **times, **starved))
    assert "times as fast" in only.text
    assert "in its steps" not in only.text


def test_little_between_the_steps_is_no_reason_to_tune():
    wall = walled(steps_s=95.0, validation_s=2.0, checkpoint_s=2.0, start_s=1.0)
    (found,) = run_rules(evidence(ceiling=1.02, wall=wall))
    assert found.id == "healthy"
    assert found.evidence["at_ceiling_frac"] == pytest.approx(95 / 99 / 1.02)


def test_setting_up_a_run_of_seconds_is_nothing_to_tune():
    (found,) = run_rules(evidence(ceiling=1.02, wall=walled(steps_s=1.0, start_s=0.5, end_s=0.2)))
    assert found.id == "healthy"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (evidence(), "no ceiling was measured"),
        (widely_known(evidence(ceiling=1.03, wait_ms=4.0)), "28.4 % of a step went into data"),
        (Evidence(evidence(ceiling=1.01).record), "what passed between them was not measured"),
    ],
)
def test_what_is_not_known_is_said_to_be_unknown(given, said):
    (found,) = run_rules(given)
    assert found.id == "unknown"
    assert said in found.text
    assert found.severity == "info"


def test_of_a_machine_that_others_use_no_gain_is_promised():
    def watched(own: float, others: float, **more):
        curve = {"cpu_pct": np.full(20, own), "others_cpu_pct": np.full(20, others)}
        return evidence(wait_ms=30.0, ceiling=4.0, cores=2.0, curves={HOST: curve}, **more)

    starved = {"plan": {"loader.num_workers": 0, "loader.backend": "inline"}, "loading": {"build_ms_mean": 30.0}}
    free = run_rules(watched(100.0, 0.0, **starved))
    assert free[0].gain is not None
    busy = run_rules(watched(20.0, 180.0, **starved))
    assert busy[0].id == "busy_machine"
    assert "other programs took 1.8 of your 2 cores; this run got 0.2" in busy[0].text
    assert busy[1].id == free[0].id
    assert "can't be predicted beside other programs" in busy[1].text
    assert [one.gain for one in busy] == [None] * len(busy)
    assert not any("predicted." in one.text.removesuffix("No gain can be predicted from this run.") for one in busy)
    assert "healthy" not in ids(watched(20.0, 180.0))
    assert ids(watched(100.0, 40.0))[0] != "busy_machine", "a program that is idle most of the time"
    assert ids(watched(20.0, 100.0))[0] != "busy_machine", "there is a core to be had"
    host = {"cpu_pct": 20.0, "rss_gib": 1.0, "core_wait_frac": 0.01}
    assert ids(watched(20.0, 180.0, host=host))[0] == "busy_machine", "its batches may come late for want of a core"
    untouched = watched(20.0, 180.0, host=host)
    untouched.record.time["wait_frac"] = 0.0
    assert "busy_machine" not in ids(untouched), "it needed no more than it got"
    large = {"cpu_quota_cores": 2.0, "host_cores": 64}
    assert ids(watched(150.0, 3000.0, machine=large))[0] != "busy_machine", "others have the other cores"
    assert ids(watched(20.0, 6380.0, machine=large))[0] == "busy_machine"


def test_lost_time_that_nobody_explains_is_not_called_healthy():
    assert ids(evidence(compute_ms=10, ceiling=1.5, host_ms=0.5))[0] == "machine_was_slower"
    assert ids(evidence(wait_ms=20))[0] != "healthy"


def test_the_costliest_comes_first_and_notes_last(monkeypatch):
    found = [
        Finding("note", "", {}, is_note=True),
        Finding("little", "", {}, lost_frac=0.1),
        Finding("much", "", {}, lost_frac=0.6),
        Finding("unknown", "", {}),
    ]
    monkeypatch.setattr(judge_module, "OF_STEPS", [lambda _, one=one: one for one in found])
    monkeypatch.setattr(judge_module, "OF_EVENTS", [])
    assert ids(evidence(ceiling=1.0)) == ["much", "little", "unknown", "note"]
    monkeypatch.setattr(judge_module, "OF_STEPS", [lambda _: found[0]])
    assert ids(evidence(ceiling=1.0)) == ["healthy", "note"]


def test_a_run_of_few_steps_or_none_is_said_to_be_too_short():
    (found,) = run_rules(evidence(steps=3))
    assert found.id == "too_few_steps"
    assert found.text.startswith("3 steps after the warm-up: that is too little to say where time is lost. It takes 20")
    (found,) = run_rules(Evidence(RunRecord("run", status="killed")))
    assert found.text.startswith("No step was measured after the warm-up: too little")
    assert "trainer.max_steps" in found.text
    (found,) = run_rules(Evidence(RunRecord("run", status="running")))
    assert found.text.endswith("It takes 20: ask again when the run has come further.")


def test_a_run_without_its_tables_is_judged_by_its_record():
    bare = Evidence(evidence(ceiling=1.01).record)
    assert ids(bare) == ["unknown"]
    assert bare.steps.mean_ms is not None
    np.testing.assert_allclose(bare.steps.mean_ms, 10.1)
