"""What is said of a whole run: which finding comes first, and what is said where there is none."""

from __future__ import annotations

import importlib
import pkgutil

import numpy as np

from tests.diagnosis.evidence_of import evidence
from wellfed.diagnosis import judge as judge_module
from wellfed.diagnosis import rules
from wellfed.diagnosis.evidence import Evidence
from wellfed.diagnosis.finding import Finding
from wellfed.diagnosis.judge import judge
from wellfed.record import RunRecord

VERDICTS = {"healthy", "too_few_steps", "machine_was_slower", "unexplained"}


def ids(given):
    return [finding.id for finding in judge(given)]


def test_every_rule_is_asked():
    files = {module.name for module in pkgutil.iter_modules(rules.__path__)}
    asked = {rule.__module__.rsplit(".", 1)[1] for rule in (*judge_module.OF_EVENTS, *judge_module.OF_STEPS)}
    assert files == asked | VERDICTS
    assert not asked & VERDICTS
    for name in files:
        assert callable(importlib.import_module(f"wellfed.diagnosis.rules.{name}").check)


def test_a_run_at_its_ceiling_is_told_to_stop_tuning():
    (found,) = judge(evidence(ceiling=1.02))
    assert found.id == "healthy"
    assert found.severity == "info"
    assert found.text == "Stop tuning: 98.0 % of the ceiling, and nothing that costs time was found."
    noisy = evidence(ceiling=1.2)
    rate = noisy.record.throughput["samples_per_s"]
    noisy.record.throughput["ci95"] = [0.8 * rate, 1.2 * rate]
    assert "83.3 % of the ceiling, but the rate is known no better than 66.7 % to 100.0 %" in judge(noisy)[0].text
    assert "as fast as with all its data" in judge(evidence(ceiling=0.9))[0].text
    assert "no ceiling was measured" in judge(evidence())[0].text


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
    (found,) = judge(evidence(steps=3))
    assert found.id == "too_few_steps"
    assert found.text.startswith("3 steps after the warm-up: that is too little to say where time is lost. It takes 20")
    (found,) = judge(Evidence(RunRecord("run", status="killed")))
    assert found.text.startswith("No step was measured after the warm-up: too little")
    assert "trainer.max_steps" in found.text
    (found,) = judge(Evidence(RunRecord("run", status="running")))
    assert found.text.endswith("It takes 20: ask again when the run has come further.")


def test_a_run_without_its_tables_is_judged_by_its_record():
    bare = Evidence(evidence(ceiling=1.01).record)
    assert ids(bare) == ["healthy"]
    assert bare.step_ms is not None
    np.testing.assert_allclose(bare.step_ms, 10.1)
