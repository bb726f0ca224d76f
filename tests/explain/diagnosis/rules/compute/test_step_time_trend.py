"""Steps that take longer and longer, and noise that does not."""

import numpy as np
import pytest

from tests.kit.evidence_of import evidence
from tests.kit.few import few
from wellfed.explain.diagnosis.rules.compute_rules import step_time_trend as check
from wellfed.explain.diagnosis.run_rules import run_rules
from wellfed.observe.telemetry.series import HOST

RUNS = 200


def of_steps(times_ms, **more):
    mean_ms = float(np.mean(times_ms))
    return evidence(steps=len(times_ms), compute_ms=mean_ms, columns={"compute_ms": times_ms}, **more)


def autoregressive(steps: int, autocorrelation: float, seed: int) -> np.ndarray:
    draw = np.random.default_rng(seed).standard_normal((RUNS, steps))
    for step in range(1, steps):
        draw[:, step] = autocorrelation * draw[:, step - 1] + np.sqrt(1 - autocorrelation**2) * draw[:, step]
    return draw


GROWING = 10 * np.linspace(1, 3, 120) * np.exp(0.05 * autoregressive(120, 0.5, seed=1)[0])


def test_growth_is_named_with_both_ends_and_where_it_begins():
    late = np.concatenate([np.full(60, 10.0), 10 * np.linspace(1, 3, 120)])
    assert check(of_steps(late)) is not None
    found = check(of_steps(GROWING))
    assert found.evidence["growth_factor"] == pytest.approx(2.8, rel=0.1)
    assert found.lost_frac == pytest.approx(0.47, abs=0.05)
    assert run_rules(of_steps(GROWING))[0].id == "step_time_trend"


@pytest.mark.parametrize("relative_sd", [0.05, 0.3])
@pytest.mark.parametrize("autocorrelation", few([0, 0.9, 0.98, 0.995], 2))
@pytest.mark.parametrize("steps", [60, 117, 500])
def test_noise_is_no_trend_in_99_runs_of_100(steps: int, autocorrelation: float, relative_sd: float) -> None:
    noise = 10 * np.exp(relative_sd * autoregressive(steps, autocorrelation, seed=steps))
    assert sum(check(of_steps(times_ms)) is not None for times_ms in noise) <= 0.01 * RUNS


@pytest.mark.parametrize(
    "times_ms",
    [
        np.where(np.arange(120) < 70, 10.0, 20.0),  # a jump
        np.tile(np.linspace(10, 20, 30), 4),  # growth within each epoch
        10 + 40 * np.exp(-np.arange(120) / 10),  # a warm-up
        np.linspace(10, 30, 50),  # too few
        np.linspace(10, 11.5, 120),
    ],
)
def test_other_courses_are_no_trend(times_ms):
    assert check(of_steps(times_ms)) is None


def test_larger_batches_take_longer_without_a_trend():
    samples = np.linspace(100, 300, 120)
    columns = {"compute_ms": samples / 10, "samples": samples}
    assert check(evidence(steps=120, compute_ms=20.0, columns=columns)) is None


@pytest.mark.parametrize(("last_pct", "is_named"), [(400.0, False), (60.0, True)])
def test_other_programs_that_take_more_and_more_explain_the_growth(last_pct, is_named):
    curves = {HOST: {"others_cpu_pct": np.linspace(0.0, last_pct, 30), "time_s": np.arange(30.0)}}
    assert (check(of_steps(GROWING, curves=curves)) is not None) is is_named
