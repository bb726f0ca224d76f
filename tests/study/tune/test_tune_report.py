"""What a tune says at its end, on the terminal and on its page."""

from __future__ import annotations

from pathlib import Path

import pytest

from wellfed.record import FindingEntry
from wellfed.study.objective import SAMPLES_PER_S
from wellfed.study.points.guided.gain import TuneGain
from wellfed.study.points.guided.moves import TuneMachine
from wellfed.study.points.guided.tune_search import TuneSearch
from wellfed.study.points.guided.tune_steps import TuneBudget
from wellfed.study.points.guided.tune_trial import Change, TuneTrial
from wellfed.study.tune.tune_file import TuneFile, TurnsMeasured
from wellfed.study.tune.tune_options import WrittenOptions
from wellfed.study.tune.tune_report import TuneReport, TuneScreen

FILE = TuneFile("mine", "recsys", "triplets", (), "samples_per_s", 200, "abc", "2 cores; no GPU")
LARGER = ("workload.effective_batch_size=512",)
ADVICE: FindingEntry = {
    "id": "small_batch",
    "severity": "high",
    "message": "Batches are small.",
    "evidence": {},
    "change": list(LARGER),
    "changes_learning": True,
    "gain": None,
    "text": "",
}


@pytest.fixture
def search() -> TuneSearch:
    """Of a start, a change that was kept, and one that failed."""
    made = TuneSearch(SAMPLES_PER_S, TuneBudget(3, 60.0), TuneMachine(2, False))
    made.tell(Change((), "the start"), TuneTrial("ok", 100.0, (99.0, 101.0), 5.0))
    turned = ("loader=auto",)
    made.tell(
        Change(turned, "half of each step waits", turned), TuneTrial("ok", 200.0, (199.0, 201.0), 4.0, None, [ADVICE])
    )
    more = ("gpu.compile=default",)
    made.tell(Change((*turned, *more), "it computes", more), TuneTrial("timeout", seconds=6.0, error="had not\nended"))
    assert made.propose() is None
    return made


def report(search: TuneSearch, comparison: TurnsMeasured | None, written: WrittenOptions) -> TuneReport:
    assert search.best is not None
    return TuneReport(FILE, search, search.best, comparison, written)


def test_all_is_told_and_the_line_to_use_is_last(search: TuneSearch) -> None:
    gain = TuneGain(1.9, (1.8, 2.0), 3)
    written = WrittenOptions((Path("configs/loader/mine.yaml"),), None, ("loader=mine", "seed=1 2"))
    made = report(search, TurnsMeasured([1.0] * 3, [1.9] * 3, gain, 30.0), written)
    *_, spent, noise, proven, advice, files, use = made.lines()
    assert spent == "3 trials in 15.0 s; ended because 3 trials are done, as many as were allowed."
    assert noise == "Noise between runs: unknown, since no configuration was measured twice."
    assert proven.startswith("Start and result in turn (30.0 s): 1.90 times as good in rate (95 % interval 1.80 to 2.0")
    assert advice.startswith("Advice: workload.effective_batch_size=512: changes what is learned, so it was not tried.")
    assert files == "Written: configs/loader/mine.yaml"
    assert use == "Use it: python src/train.py loader=mine 'seed=1 2'"
    page = made.page()
    for said in (spent, proven, advice, files, "python src/train.py loader=mine 'seed=1 2'", "| loader=auto |"):
        assert said in page


def test_where_nothing_was_written_it_says_why(search: TuneSearch) -> None:
    written = WrittenOptions((), "the gain is within noise", (), ("loader=auto",))
    made = report(search, TurnsMeasured([1.0], [1.1], TuneGain(1.1, None, 1), 9.0), written)
    assert [*made.lines()][-3:] == [
        "No options were written: the gain is within noise.",
        "Not proven: python src/train.py loader=auto",
        "Use it: python src/train.py",
    ]
    assert "Not proven: python src/train.py loader=auto" in made.page()


def test_a_start_that_stays_is_told(search: TuneSearch) -> None:
    lines = list(report(search, None, WrittenOptions((), "nothing is better than the start", ())).lines())
    assert "Nothing that was tried is better than the start beyond noise: the start stays." in lines
    assert lines[-1] == "Use it: python src/train.py"


def test_each_trial_is_a_line(search: TuneSearch, capsys: pytest.CaptureFixture[str]) -> None:
    screen = TuneScreen(SAMPLES_PER_S, sample_unit="triplets")
    for number, step in enumerate(search.steps, 1):
        screen.step(number, step)
    assert capsys.readouterr().out.splitlines() == [
        "1. the start: 100 triplets/s, 5.0 s",
        "2. loader=auto: 200 triplets/s, kept: 2.0 times as good, 4.0 s",
        "3. gpu.compile=default: dropped: timeout: had not ended, 6.0 s",
    ]
