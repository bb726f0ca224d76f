from __future__ import annotations

from wellfed.study.objective import PEAK_MEMORY, SAMPLES_PER_S
from wellfed.study.points.guided.gain import TuneGain
from wellfed.study.points.guided.tune_search import Advice
from wellfed.study.points.guided.tune_steps import Step
from wellfed.study.points.guided.tune_trial import Change, TuneTrial
from wellfed.study.tune.tune_report import advice_in_words, as_markdown, as_text, gain_in_words

STEPS = [
    Step(Change((), "the start"), TuneTrial("ok", 1000.0), True, None, None, "the start"),
    Step(
        Change(("loader.num_workers=2",), "40 % waits | for data", ("loader.num_workers=2",), "too_few_workers"),
        TuneTrial("ok", 1500.0),
        *(True, 1000.0, 1.5, "1.50 times as good"),
    ),
    Step(
        Change(("loader.num_workers=2", "gpu.compile=default"), "computes", ("gpu.compile=default",)),
        TuneTrial("failed", error="no compiler\nhere"),
        *(False, 1500.0, None, "failed: no compiler\nhere"),
    ),
]


def test_each_step_is_a_row_with_what_led_to_it_and_what_became_of_it() -> None:
    lines = [*as_text(STEPS, SAMPLES_PER_S, "clips")]
    assert "before (clips/s)" in lines[0]
    assert "(the start)" in lines[1]
    assert lines[2].split() == [
        "loader.num_workers=2",
        "1,000",
        "1,500",
        "1.50",
        *["kept:", "1.50", "times", "as", "good"],
    ]
    assert lines[3].strip() == "40 % waits | for data"
    assert lines[4].split()[:4] == ["gpu.compile=default", "1,500", "-", "-"]
    assert lines[4].endswith("dropped: failed: no compiler here")
    assert len({line.index("1,") for line in (lines[2], lines[4])}) == 1


def test_markdown_has_as_many_cells_in_each_row() -> None:
    rows = [*as_markdown(STEPS, SAMPLES_PER_S, "clips")]
    assert len(rows) == 2 + len(STEPS)
    assert {row.replace("\\|", "").count("|") for row in rows} == {7}


def test_advice_says_why_it_was_not_tried() -> None:
    advice = Advice(("workload.effective_batch_size=128",), "A step is small.", "changes what is learned", True)
    (line,) = advice_in_words([advice])
    assert line == ("workload.effective_batch_size=128: changes what is learned, so it was not tried. A step is small.")


def test_the_gain_is_told_with_its_interval_and_a_verdict() -> None:
    assert gain_in_words(TuneGain(1.5, (1.4, 1.6), 5), SAMPLES_PER_S) == (
        "1.50 times as good in rate (95 % interval 1.40 to 1.60, 5 rounds in turns): beyond noise."
    )
    assert gain_in_words(TuneGain(1.01, (0.9, 1.1), 5), SAMPLES_PER_S).endswith("within noise.")
    assert gain_in_words(TuneGain(0.8, (0.7, 0.9), 5), SAMPLES_PER_S).endswith("worse beyond noise.")
    assert "one round" in gain_in_words(TuneGain(1.5, None, 1), SAMPLES_PER_S)
    assert "peak" in gain_in_words(None, PEAK_MEMORY)
