from hypothesis import given
from hypothesis import strategies as st

from wellfed.record.entries import RunRecord
from wellfed.study.rows import Row
from wellfed.study.tune.trial import TuneTrial, knob_of, with_overrides

WORDS = st.lists(
    st.builds("{}={}".format, st.sampled_from(("loader.num_workers", "loader", "gpu.compile")), st.integers(0, 3))
)


def test_a_trial_has_the_figures_of_its_row_and_the_settings_of_its_record() -> None:
    row = Row("p", "trial", (), "ok", 1, samples_per_s=100.0, ci95=(98.0, 102.0), ceiling_samples_per_s=150.0)
    trial = TuneTrial(row, RunRecord("run", findings=[], config={"loader": {"num_workers": 2}}))
    assert (trial.figure, trial.relative_half, trial.ceiling_factor) == (100.0, 0.02, 1.5)
    assert trial.asked("loader.num_workers") == 2
    assert trial.asked("loader.backend") is None
    assert trial.asked("gpu.compile.more") is None


def test_what_did_not_end_well_has_no_figure_and_says_why() -> None:
    error = {"kind": "device_oom", "message": "out of\nmemory", "advice": ""}
    trial = TuneTrial(Row("p", "trial", (), "oom", 1, samples_per_s=3.0, error=error), RunRecord("p"))
    assert (trial.figure, trial.problem) == (None, "oom: out of memory")
    silent = TuneTrial(Row("p", "trial", (), "ok", 1), RunRecord("run"))
    assert (silent.figure, silent.problem) == (None, "ok: no rate")


@given(WORDS, WORDS)
def test_a_knob_that_is_typed_again_has_the_later_value_alone(words: list[str], turned: list[str]) -> None:
    typed = with_overrides(words, turned)
    assert typed[len(typed) - len(turned) :] == tuple(turned)
    behind = {knob_of(word) for word in turned}
    assert not {knob_of(word) for word in typed[: len(typed) - len(turned)]} & behind
