"""When a run counts as slower than another, and which runs can't be compared."""

import math
from dataclasses import replace
from typing import Any

import pytest

from tests.kit.evidence_of import evidence
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.report.comparison import Comparison, Ratio
from wellfed.explain.report.slowdown import Slowdown, disturbances, reasons_against

MACHINE = {"cpu": "Xeon", "cpu_quota_cores": 8.0, "gpus": []}
RATE = {"samples_per_s": 9.0, "ci95": [8.0, 10.0], "warmup_steps": 3, "sample_unit": "samples"}
RANK: Any = {"rank": 0}


@pytest.mark.parametrize(
    ("ratio", "is_beyond", "is_within", "verdict"),
    [
        (Ratio(1.1, 1.07, 1.13), True, False, "Slower: B takes 10.0 % more time a sample than A"),
        (Ratio(1.02, 1.0, 1.04), False, True, "Within the limit of 5 %: B takes 2.0 % more time"),
        (Ratio(0.9, 0.85, 0.95), False, True, "Within the limit of 5 %: B takes 10.0 % less time"),
        (Ratio(1.1, 1.02, 1.2), False, False, "Not told apart: B takes 10.0 % more time a sample than A (95 %"),
        (Ratio(3.0, 1.2, math.inf), True, False, "Slower: B takes 200.0 % more time a sample than A (95 %"),
    ],
)
def test_the_whole_interval_decides(ratio: Ratio, is_beyond: bool, is_within: bool, verdict: str) -> None:
    found = Slowdown(ratio, 0.05)
    assert (found.is_beyond_limit, found.is_within_limit) == (is_beyond, is_within)
    assert found.verdict.startswith(verdict)


def test_without_an_interval_nothing_is_judged() -> None:
    found = Slowdown(Ratio(2.0), 0.05)
    assert (found.is_beyond_limit, found.is_within_limit) == (False, False)
    assert found.measured == "B takes 100.0 % more time a sample than A"


def run(**facts: Any) -> Evidence:
    found = evidence(steps=200, config=facts.pop("config", {"loader": {"num_workers": 2}}))
    return replace(found, record=replace(found.record, **{"machine": MACHINE, "workload": "speech", **facts}))


def test_runs_of_the_same_work_on_the_same_machine_are_compared() -> None:
    a = run(
        boot_id="same",
        config={"seed": 1, "paths": {"log_dir": "a"}, "loader": {"num_workers": 2}, "logger": {"tags": ["a"]}},
    )
    b = run(
        config={
            "seed": 2,
            "paths": {"log_dir": "b"},
            "loader": {"num_workers": 2},
            "logger": {"tags": ["b"]},
        },
        host_name="another",
        boot_id="same",
        machine={**MACHINE, "versions": {"torch": "2.9"}},
        git={"commit": "b" * 40, "dirty": True, "changed": ["x"], "digest": "0"},
    )
    assert [*reasons_against(Comparison(a, b))] == []


@pytest.mark.parametrize(
    ("facts", "where", "problem"),
    [
        ({"status": "oom"}, "B", "has the status oom."),
        ({"throughput": None}, "B", "has too few measured steps"),
        ({"throughput": {**RATE, "steps": 12, "ci95": None}}, "B", "has too few measured steps"),
        ({"workload": "forecast"}, "workload", "Different workloads, speech and forecast"),
        ({"config": {"workload": {"data": 2}, "loader": {"num_workers": 2}}}, "workload", "What is learned differs"),
        ({"throughput": {**RATE, "steps": 100}}, "number of measured steps", "is 200 in A and 100 in B."),
        ({"host_name": "another"}, "host", "is  in A and another in B."),
        ({"ranks": [RANK, RANK]}, "ranks", "is 1 in A and 2 in B."),
        ({"machine": {**MACHINE, "cpu": "Epyc"}}, "device", "is Xeon in A and Epyc in B."),
        ({"machine": {**MACHINE, "cpu_quota_cores": 4.0}}, "cores", "is 8 in A and 4 in B."),
        ({"config": {"loader": {"num_workers": 4}}}, "settings", "differ: loader.num_workers."),
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, str) else None,
)
def test_what_differs_is_named(facts: dict[str, Any], where: str, problem: str) -> None:
    (fault,) = reasons_against(Comparison(run(), run(**facts)))
    assert fault.where == where
    assert fault.problem.startswith(problem)
    assert fault.way_out


def test_where_settings_are_compared_they_may_differ_and_the_work_may_not() -> None:
    b = run(config={"loader": {"num_workers": 4}})
    assert [*reasons_against(Comparison(run(), b), settings_may_differ=True)] == []
    other = run(workload="forecast", config={"loader": {"num_workers": 4}})
    assert [fault.where for fault in reasons_against(Comparison(run(), other), settings_may_differ=True)] == [
        "workload"
    ]


def script(*arguments: str, parameters: int = 10, workers: int = 0, batch_size: int = 8) -> Evidence:
    """A script that `wellfed watch` ran."""
    found = {"parameter_values": parameters}
    loader = {"num_workers": workers, "prefetch_factor": 2 if workers else None, "persistent_workers": bool(workers)}
    config = {
        "script": "train.py",
        "workload": {"sample_unit": "samples", "effective_batch_size": batch_size},
        "gpu": {"precision": "32-true", "tf32": False, "compile": "none"},
        "loader": {"backend": "torch", **loader, "pin_memory": False, "is_iterable": False},
    }
    return run(config=config, overrides=[*arguments], process=found)


def test_of_scripts_the_work_is_compared_and_no_setting_of_their_loader() -> None:
    a = script("--width=8")
    assert [*reasons_against(Comparison(a, script("--width=8", workers=4)))] == []
    (fault,) = reasons_against(Comparison(a, script("--width=8", batch_size=16)))
    assert fault.where == "workload"
    faults = [*reasons_against(Comparison(a, script("--width=9", parameters=12)))]
    assert [(fault.where, fault.problem) for fault in faults] == [
        ("arguments", "is --width=8 in A and --width=9 in B."),
        ("trained parameters", "is 10 in A and 12 in B."),
    ]


@pytest.mark.parametrize(
    ("id", "evidence", "is_named"),
    [
        ("busy_machine", {}, True),
        ("machine_was_slower", {}, True),
        ("clocks_limited", {"limited_by": "heat"}, True),
        ("clocks_limited", {"limited_by": "power"}, False),  # as on every card at its limit
        ("too_few_workers", {}, False),
    ],
)
def test_findings_about_the_machine_are_named(id: str, evidence: dict[str, Any], is_named: bool) -> None:
    found: Any = {"id": id, "message": "It was so", "evidence": evidence}
    faults = [str(fault) for fault in disturbances(Comparison(run(), run(findings=[found])))]
    assert faults == ([f"B: has {id}. It was so. Run both again."] if is_named else [])
