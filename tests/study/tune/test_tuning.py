"""The order of things in a tune, with trials whose ends are made up."""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.kit.composed import compose
from wellfed import project
from wellfed.cli.exit_code import report_error
from wellfed.config.schema import TuneConfig, TuneRunConfig, TuneWrite
from wellfed.errors import WellfedError
from wellfed.record.entries import RunRecord
from wellfed.study.objective import SAMPLES_PER_S
from wellfed.study.rows import Row
from wellfed.study.study_files import TuneFile
from wellfed.study.tune.moves import TuneMachine
from wellfed.study.tune.trial import Change, TuneTrial
from wellfed.study.tune.tuning import TuneScreen, TuneStudy
from wellfed.study.tune.walk import Walk
from wellfed.study.tune.written_experiment import TuneExperiment

FASTER = ("memory.features=cache",)
"""What the table of moves tries where features are computed anew."""


def ended(rate: float | None = 100.0, half: float = 0.001, seconds: float = 6.0, **more: Any) -> Row:
    made = Row("p", "trial", (), "ok", 1, samples_per_s=rate, seconds=seconds, folder="p", code="abc")
    return replace(made, **({} if rate is None else {"ci95": (rate * (1 - half), rate * (1 + half))}), **more)


class Played:
    """In the place of `TuneTrials`: each configuration ends as ``play`` says."""

    def __init__(
        self, play: Callable[[Sequence[str]], Row], turns: Sequence[tuple[Row, Row]] = (), beside_s: float = 0.0
    ) -> None:
        self._play, self._turns, self._beside_s = play, list(turns), beside_s

    def measure(self, change: Change, number: int = 0) -> TuneTrial:
        features = "cache" if FASTER[0] in change.overrides else "dynamic"
        plan: Any = {"memory.features": {"value": features, "because": "", "source": "predicted"}}
        config: Any = {"loader": {}, "memory": {}}
        record = replace(RunRecord.start("x"), plan=plan, config=config)
        return TuneTrial(replace(self._play(change.overrides), overrides=change.overrides), record, self._beside_s)

    latest = measure_again = measure

    def round_of(self, overrides: Sequence[str], number: int) -> tuple[Row, Row]:
        return self._turns[number - 1]


def made(folder: Path, **asked: Any) -> TuneStudy:
    start = compose(["loader=baseline"])
    config = TuneRunConfig(tune=TuneConfig(rounds=3, **asked))
    file = TuneFile(
        name="mine",
        workload="recsys",
        sample_unit="triplets",
        start=("loader=baseline",),
        trial_steps=200,
        code="abc",
        machine="2 cores; no GPU",
    )
    shutil.copytree(project.configs(), folder / "configs")
    experiment = TuneExperiment("mine", config.tune, start, [flag(folder)])
    screen = TuneScreen(SAMPLES_PER_S, sample_unit="triplets")
    search = Walk(config.tune.max_trials, 60 * config.tune.max_minutes, TuneMachine(2, False))
    return TuneStudy(folder, screen, config, start, file, experiment, search)


def found(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "tune.json").read_text())


def tuned(folder: Path, play: Played, **asked: Any) -> int:
    tune = made(folder, **asked)
    tune._run_steps(play)  # type: ignore[arg-type]
    tune.measured = play  # type: ignore[assignment]
    tune._comparison = tune._compare(play)  # type: ignore[arg-type]
    return tune.finish()


def flag(folder: Path) -> str:
    return f"--config-path={folder / 'configs'}"


def faster(overrides: Sequence[str]) -> Row:
    return ended(150.0 if FASTER[0] in overrides else 100.0)


BROKEN = ended(None, status="failed", error={"kind": "code", "message": "boom", "advice": ""})


def test_what_is_faster_in_turns_is_the_line_to_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    turns = [(ended(100.0 + number), ended(150.0)) for number in range(3)]
    assert tuned(tmp_path, Played(faster, turns), write=TuneWrite.never) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "Measuring start and result again, at most 3 rounds in turn: about 36.0 s" in lines
    assert lines[-1] == f"Use it: python src/train.py {flag(tmp_path)} loader=baseline memory.features=cache"
    assert (found(tmp_path)["result"], found(tmp_path)["unproven"]) == ([*FASTER], [])


@pytest.mark.parametrize("write", [TuneWrite.auto, TuneWrite.always])
@pytest.mark.parametrize("turns", [[(ended(), BROKEN)], [(ended(), ended(150.0)), (ended(), BROKEN)]])
def test_a_result_that_fails_in_its_comparison_is_not_recommended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], turns: list[tuple[Row, Row]], write: TuneWrite
) -> None:
    assert tuned(tmp_path, Played(faster, turns), write=write) == 0
    out = capsys.readouterr().out
    assert f"The result did not end well in round {len(turns)}: failed: boom" in out
    assert "So the start stays." in out
    assert "memory.features=cache" not in out.splitlines()[-1]
    assert found(tmp_path)["result"] == []
    written = tmp_path / "configs" / "experiment" / "mine.yaml"
    assert written.exists() is (write is TuneWrite.always)
    if written.exists():  # the start's
        assert "; the start. On 2 cores; no GPU." in written.read_text()


def test_a_gain_within_noise_is_told_beside_the_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    turns = [(ended(100.0), ended(rate)) for rate in (150.0, 80.0, 120.0)]
    tuned(tmp_path, Played(faster, turns))
    assert capsys.readouterr().out.splitlines()[-2:] == [
        f"Not proven: python src/train.py {flag(tmp_path)} loader=baseline memory.features=cache",
        f"Use it: python src/train.py {flag(tmp_path)} loader=baseline",
    ]
    file = found(tmp_path)
    assert (file["result"], file["use"]) == ([*FASTER], [flag(tmp_path), "loader=baseline"])
    assert file["unproven"] == [flag(tmp_path), "loader=baseline", *FASTER]


@pytest.mark.parametrize(
    ("kind", "exit_code", "code"),
    [("code", None, 1), ("device_oom", 3, 3), ("host_oom", -9, 3), ("config", None, 2), ("data", 1, 1)],
)
def test_a_start_that_failed_is_stopped_in_its_file(
    tmp_path: Path, kind: str, exit_code: int | None, code: int
) -> None:
    broken = replace(BROKEN, error={"kind": kind, "message": "boom", "advice": ""}, exit_code=exit_code)
    with pytest.raises(WellfedError, match=r"\(failed\): boom") as raised:
        made(tmp_path)._run_steps(Played(lambda _: broken))  # type: ignore[arg-type]
    file = found(tmp_path)
    assert (file["status"], file["ended_because"]) == ("stopped", "the start could not be measured: failed: boom")
    assert file["steps"][0]["status"] == "failed"
    assert report_error(raised.value) == code


def test_preparing_is_of_the_budget(tmp_path: Path) -> None:
    tune = made(tmp_path, max_minutes=1.0)
    tune._run_steps(Played(lambda _: ended(), beside_s=60.0))  # type: ignore[arg-type]
    assert len(tune.search.steps) == 1
    assert "another trial would not end within" in str(tune.search.ended_because)
