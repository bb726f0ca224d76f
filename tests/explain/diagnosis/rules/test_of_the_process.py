"""What the training process is seen to do: busy threads, few threads, many tensors, wide batches."""

import numpy as np
import pytest

from tests.kit.evidence_of import evidence
from tests.kit.loader_evidence import fed_by
from wellfed.explain.diagnosis.rules.compute_rules import busy_thread, few_threads, many_tensors, wide_batches
from wellfed.explain.diagnosis.run_rules import run_rules
from wellfed.explain.diagnosis.script_words import in_words
from wellfed.observe.telemetry.machines import HOST


def of_process(*, cpu_pct=100.0, others_pct=0.0, cores=4.0, **process):
    known = {"torch_threads": 4, "parameter_tensors": 8, "parameter_values": 10_000, "busy_threads": [], **process}
    curves = {HOST: {"cpu_pct": np.full(10, cpu_pct), "others_cpu_pct": np.full(10, others_pct)}}
    return evidence(cores=cores, curves=curves, process=known)


def test_a_busy_thread_is_named():
    run = of_process(busy_threads=[{"name": "Thread-3 (refresh)", "cores": 0.9}, {"name": "slow", "cores": 0.06}])
    found = run_rules(run)[0]
    assert found.id == "busy_thread"
    assert "The thread 'Thread-3 (refresh)' of the training process took 0.90 cores" in found.message
    assert "up to 90.0 % of the time" in found.message
    assert busy_thread(of_process(busy_threads=[{"name": "slow", "cores": 0.06}])) is None


def test_idle_cores_beside_one_thread_are_noted():
    found = few_threads(of_process(torch_threads=1))
    assert found.is_note
    assert "with 1 thread, and 3.0 of 4 cores stood idle" in found.message


@pytest.mark.parametrize(
    "run",
    [
        of_process(torch_threads=1, others_pct=290.0),
        of_process(torch_threads=1, cpu_pct=20.0),  # its steps do not compute
        of_process(torch_threads=4),
        of_process(torch_threads=1, cores=1.0),
        evidence(process=None),
    ],
)
def test_full_cores_and_resting_steps_are_no_want_of_threads(run):
    assert few_threads(run) is None


def test_many_small_tensors_are_noted_and_large_ones_are_not():
    found = many_tensors(of_process(parameter_tensors=3000, parameter_values=51_000))
    assert found.is_note
    assert "trains 3,000 tensors of 17 values on average" in found.message
    assert "are fused, so they update all in one call" in found.message  # as a run makes them
    assert "update all in one call with fused=True;" in in_words(found.message)  # a script may not
    assert many_tensors(of_process(parameter_tensors=3000, parameter_values=3_000_000_000)) is None


def test_batches_of_float64_are_noted():
    found = wide_batches(fed_by(2, build_ms=5.0, loading={"batch_dtypes": {"float64": 6.0, "int64": 0.5}}))
    assert found.is_note
    assert "6.0 MiB of a batch's 6.5 MiB are float64" in found.message
    assert wide_batches(fed_by(2, build_ms=5.0, loading={"batch_dtypes": {"float32": 6.0, "float64": 0.1}})) is None
    assert wide_batches(fed_by(2, build_ms=5.0)) is None
