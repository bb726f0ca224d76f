"""When a run counts as slower than another, and which runs can't be compared."""

import math
from dataclasses import replace
from typing import Any

import pytest

from tests.kit.evidence_of import evidence
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.report.comparison import Comparison, Ratio
from wellfed.explain.report.slowdown import Slowdown, reasons_against

MACHINE = {"cpu": "Xeon", "cpu_quota_cores": 8.0, "gpus": []}


@pytest.mark.parametrize(
    ("ratio", "is_beyond", "is_within", "verdict"),
    [
        (
            Ratio(1.1, 1.07, 1.13),
            True,
            False,
            "Slower: B takes 10.0 % more time a sample than A (95 % interval +7.0 % to +13.0 %), which is above the "
            "limit of 5 %.",
        ),
        (
            Ratio(1.02, 1.0, 1.04),
            False,
            True,
            "Not slower: B takes 2.0 % more time a sample than A (95 % interval +0.0 % to +4.0 %), which is within the "
            "limit of 5 %.",
        ),
        (
            Ratio(0.9, 0.85, 0.95),
            False,
            True,
            "Not slower: B takes 10.0 % less time a sample than A (95 % interval -15.0 % to -5.0 %), which is within "
            "the limit of 5 %.",
        ),
        (
            Ratio(1.1, 1.02, 1.2),
            False,
            False,
            "Not told apart: B takes 10.0 % more time a sample than A (95 % interval +2.0 % to +20.0 %), which "
            "includes the limit of 5 %. More steps or rounds narrow the interval.",
        ),
        (
            Ratio(3.0, 1.2, math.inf),
            True,
            False,
            "Slower: B takes 200.0 % more time a sample than A (95 % interval +20.0 % or more), which is above the "
            "limit of 5 %.",
        ),
    ],
)
def test_the_whole_interval_decides(ratio: Ratio, is_beyond: bool, is_within: bool, verdict: str) -> None:
    found = Slowdown(ratio, 0.05)
    assert (found.is_beyond_limit, found.is_within_limit, found.verdict) == (is_beyond, is_within, verdict)


def test_without_an_interval_nothing_is_judged() -> None:
    found = Slowdown(Ratio(2.0), 0.05, "C")
    assert (found.is_beyond_limit, found.is_within_limit) == (False, False)
    assert found.measured == "C takes 100.0 % more time a sample than A"


def run(**facts: Any) -> Evidence:
    found = evidence(steps=200, config=facts.pop("config", {"loader": {"num_workers": 2}}))
    return replace(found, record=replace(found.record, **{"machine": MACHINE, "workload": "speech", **facts}))


def test_runs_of_the_same_work_on_the_same_machine_are_compared() -> None:
    a = run(config={"seed": 1, "paths": {"log_dir": "a"}, "loader": {"num_workers": 2}})
    b = run(
        config={"seed": 2, "paths": {"log_dir": "b"}, "loader": {"num_workers": 2}},
        host_name="another",
        machine={**MACHINE, "versions": {"torch": "2.9"}},
        git={"commit": "b" * 40, "dirty": True, "diff": "x"},
    )
    assert [*reasons_against(Comparison(a, b))] == []


@pytest.mark.parametrize(
    ("facts", "where", "problem"),
    [
        ({"status": "running"}, "B", "still runs."),
        ({"status": "oom"}, "B", "ended as oom."),
        ({"throughput": None}, "B", "has no rate: all its steps were warm-up."),
        (
            {
                "throughput": {
                    "samples_per_s": 9.0,
                    "ci95": None,
                    "steps": 12,
                    "warmup_steps": 3,
                    "sample_unit": "samples",
                }
            },
            "B",
            "has 12 measured steps, and an interval needs 40.",
        ),
        ({"workload": "forecast"}, "workload", "Different workloads, speech and forecast: rates, times and metrics"),
        (
            {"config": {"workload": {"data": {"scale": 2}}, "loader": {"num_workers": 2}}},
            "workload",
            "What is learned differs (workload",
        ),
        ({"machine": {**MACHINE, "cpu": "Epyc"}}, "device", "is Xeon in A and Epyc in B."),
        ({"machine": {**MACHINE, "cpu_quota_cores": 4.0}}, "machine.cpu_quota_cores", "is 8 in A and 4 in B."),
        ({"config": {"loader": {"num_workers": 4}}}, "loader.num_workers", "is 2 in A and 4 in B."),
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, str) else None,
)
def test_what_differs_is_named(facts: dict[str, Any], where: str, problem: str) -> None:
    (fault,) = reasons_against(Comparison(run(), run(**facts)))
    assert fault.where == where
    assert fault.problem.startswith(problem)
    assert fault.way_out


def test_another_processor_beside_the_same_gpu_is_named() -> None:
    gpu = {"gpus": [{"name": "NVIDIA H200", "memory_gib": 140.0}]}
    (fault,) = reasons_against(
        Comparison(run(machine={**MACHINE, **gpu}), run(machine={**MACHINE, **gpu, "cpu": "Epyc"}))
    )
    assert str(fault) == "machine.cpu: is Xeon in A and Epyc in B. Run both on the same machine."


def test_where_settings_are_compared_they_may_differ_and_few_steps_do() -> None:
    few = {"samples_per_s": 9.0, "ci95": None, "steps": 12, "warmup_steps": 3, "sample_unit": "samples"}
    b = run(config={"loader": {"num_workers": 4}}, throughput=few)
    assert [*reasons_against(Comparison(run(), b), settings_may_differ=True)] == []
    other = run(workload="forecast", config={"loader": {"num_workers": 4}})
    assert [fault.where for fault in reasons_against(Comparison(run(), other), settings_may_differ=True)] == [
        "workload"
    ]
