"""The end of a tune, on the terminal."""

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from wellfed.record.entries import FindingEntry, RunRecord
from wellfed.study.board.step_table import gain_text, show
from wellfed.study.objective import SAMPLES_PER_S
from wellfed.study.rows import Row
from wellfed.study.study_files import TuneFile
from wellfed.study.tune.moves import TuneMachine
from wellfed.study.tune.trial import Change, TuneTrial
from wellfed.study.tune.tuning import TuneScreen
from wellfed.study.tune.walk import Walk
from wellfed.study.tune_gain import TuneGain, TurnsMeasured

FILE = TuneFile(
    name="mine",
    workload="recsys",
    sample_unit="triplets",
    start=(),
    trial_steps=200,
    code="abc",
    machine="2 cores; no GPU",
)
LARGER = ("workload.effective_batch_size=512",)
ADVICE: FindingEntry = {
    "id": "small_batch",
    "severity": "high",
    "message": "Batches are small.",
    "advice": "",
    "evidence": {},
    "change": list(LARGER),
    "changes_learning": True,
    "gain": None,
    "text": "",
}


def trial(rate: float | None, seconds: float, *findings: FindingEntry, **known: Any) -> TuneTrial:
    ci95 = None if rate is None else (rate - 1, rate + 1)
    row = Row("p", "trial", (), "ok", 1, samples_per_s=rate, ci95=ci95, seconds=seconds)
    return TuneTrial(replace(row, **known), RunRecord("p", findings=[*findings]))


@pytest.fixture
def search() -> Walk:
    """Returns a walk with a start, a change that was kept, and one that failed."""
    made, trials = Walk(4, 60.0, TuneMachine(2, False)), dict[tuple[str, ...], TuneTrial]()

    def tell(change: Change, found: TuneTrial) -> None:
        trials[change.overrides] = found
        made.judge(change, found, lambda asked, number: trials[asked.overrides])

    tell(Change((), "the start"), trial(100.0, 5.0))
    turned = ("loader=auto",)
    tell(Change(turned, "half of each step waits", turned), trial(200.0, 4.0, ADVICE))
    more, error = ("gpu.compile=default",), {"kind": "code", "message": "had not\nended", "advice": ""}
    tell(Change((*turned, *more), "it computes", more), trial(None, 6.0, status="timeout", error=error))
    assert made.next() is None
    return made


def lines(file: TuneFile) -> list[str]:
    console = Console(file=io.StringIO(), width=160)
    show(console, file)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def found(search: Walk, **known: Any) -> TuneFile:
    """Returns the file of a tune that has ended."""
    return replace(
        FILE,
        steps=[step.to_dict() for step in search.steps],
        ended_because=search.ended_because,
        trial_seconds=search.spent_seconds,
        noise=search.noise_text,
        advice=search.advice,
        **known,
    )


def test_all_is_told_and_the_line_to_use_is_last(search: Walk) -> None:
    comparison = TurnsMeasured([1.0] * 3, [1.9] * 3, TuneGain(1.9, (1.8, 2.0), 3), 30.0)
    written, use = "configs/experiment/mine.yaml", ("experiment=mine", "seed=1 2")
    file = found(search, comparison=comparison, written=written, use=use, result=("loader=auto",))
    *_, spent, noise, proven, advice, files, last = lines(file)
    assert spent == "3 trials in 20.0 s; ended because 4 trials are done, as many as were allowed."
    assert noise.startswith("Noise between runs of one configuration: 0.0 %")
    assert proven.startswith("Start and result in turn (30.0 s): 1.90 times as good in rate (95 % interval 1.80 to 2.0")
    assert advice == (
        "Advice: workload.effective_batch_size=512: changes what is learned, so it was not tried. Batches are small."
    )
    assert files == "Written: configs/experiment/mine.yaml"
    assert last == "Use it: python src/train.py experiment=mine 'seed=1 2'"


def test_where_nothing_was_written_it_says_why(search: Walk) -> None:
    comparison, unproven = TurnsMeasured([1.0], [1.1], TuneGain(1.1, None, 1), 9.0), ("loader=auto",)
    file = found(search, comparison=comparison, why_not="the gain is within noise", unproven=unproven, result=unproven)
    assert [*lines(file)][-3:] == [
        "No experiment was written: the gain is within noise.",
        "Not proven: python src/train.py loader=auto",
        "Use it: python src/train.py",
    ]


def test_each_trial_is_a_line(search: Walk, capsys: pytest.CaptureFixture[str]) -> None:
    screen = TuneScreen(SAMPLES_PER_S, sample_unit="triplets")
    for number, step in enumerate(search.steps, 1):
        screen.step(number, step)
    assert capsys.readouterr().out.splitlines() == [
        "1. the start: 100 triplets/s, 5.0 s",
        "2. loader=auto: 200 triplets/s, kept: 2.0 times as good, 1 run against 2, 4.0 s",
        "   half of each step waits",
        "3. gpu.compile=default: dropped: timeout: had not ended, 6.0 s",
        "   it computes",
    ]


def test_the_gain_is_told_with_its_interval_and_a_verdict() -> None:
    assert gain_text(TuneGain(1.5, (1.4, 1.6), 5)) == (
        "1.50 times as good in rate (95 % interval 1.40 to 1.60, 5 rounds in turns): beyond noise."
    )
    assert gain_text(TuneGain(1.01, (0.9, 1.1), 5)).endswith("within noise.")
    assert gain_text(TuneGain(0.8, (0.7, 0.9), 5)).endswith("worse beyond noise.")
    assert "one round" in gain_text(TuneGain(1.5, None, 1))
    assert "no round" in gain_text(None).lower()
