from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from wellfed.record.entries import RunRecord
from wellfed.study.objective import SAMPLES_PER_S
from wellfed.study.points.guided.change import TuneTrial, knob_of, same_plan, with_overrides
from wellfed.study.row import Row

ROW = Row(
    *("point", "trial", (), "ok", 1),
    samples_per_s=100.0,
    seconds=7.0,
    ci95=(98.0, 102.0),
    ceiling_samples_per_s=150.0,
    peak_memory_gib=2.0,
)
COMPILED: Any = {"gpu.compile": {"value": "default", "because": "gpu.compile=default", "source": "set"}}
WORDS = st.lists(
    st.builds("{}={}".format, st.sampled_from(("loader.num_workers", "loader", "gpu.compile")), st.integers(0, 3))
)


def test_a_trial_is_made_of_its_row_and_its_record() -> None:
    record = RunRecord("run", findings=[], config={"loader": {"num_workers": 2}})
    trial = TuneTrial.of(ROW, record)
    assert (trial.figure, trial.ci95, trial.seconds, trial.ceiling_factor) == (100.0, (98.0, 102.0), 7.0, 1.5)
    assert trial.is_measured
    assert trial.asked("loader.num_workers") == 2
    assert trial.asked("loader.backend") is None
    assert trial.asked("gpu.compile.more") is None
    # An interval is that of the rate.


def test_what_did_not_end_well_has_no_figure_and_says_why() -> None:
    error = {"kind": "device_oom", "message": "out of\nmemory", "advice": ""}
    trial = TuneTrial.of(Row("point", "trial", (), "oom", 1, samples_per_s=3.0, error=error), None)
    assert not trial.is_measured
    assert (trial.figure, trial.error) == (None, "out of memory")
    silent = TuneTrial.of(Row("point", "trial", (), "ok", 1), RunRecord("run"))
    assert not silent.is_measured
    assert silent.error == SAMPLES_PER_S.missing


def test_a_trial_whose_compiler_failed_ran_as_one_that_is_not_compiled() -> None:
    assert TuneTrial.of(ROW, RunRecord("run", plan=COMPILED)).value("gpu.compile") == "default"
    events = [{"kind": "compile_failed", "step": 0, "message": "InvalidCxxCompiler"}]
    trial = TuneTrial.of(ROW, RunRecord("run", plan=COMPILED, events=events))
    assert trial.is_measured
    assert (trial.value("gpu.compile"), trial.error) == ("none", "gpu.compile failed (InvalidCxxCompiler)")
    assert same_plan({"gpu.compile": trial.value("gpu.compile")}) == same_plan({"gpu.compile": "none"})


@given(WORDS, WORDS)
def test_a_knob_that_is_typed_again_has_the_later_value_alone(words: list[str], turned: list[str]) -> None:
    typed = with_overrides(words, turned)
    assert typed[len(typed) - len(turned) :] == tuple(turned)
    behind = {knob_of(word) for word in turned}
    assert not {knob_of(word) for word in typed[: len(typed) - len(turned)]} & behind


def test_plans_that_differ_in_what_does_nothing_are_the_same() -> None:
    def plan(backend: str, workers: int, **more: Any) -> Any:
        given = {"backend": backend, "num_workers": workers, **more}
        return same_plan({**{f"loader.{knob}": value for knob, value in given.items()}, "trainer.devices": 1})

    assert plan("inline", 0, prefetch_factor=None) == plan("inline", 0, prefetch_factor=4)
    assert plan("threads", 2, persistent_workers=True) == plan("threads", 2, persistent_workers=False)
    assert plan("processes", 2, persistent_workers=True) != plan("processes", 2, persistent_workers=False)
    assert plan("threads", 2, prefetch_factor=2) != plan("threads", 2, prefetch_factor=4)
