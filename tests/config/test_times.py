"""Knobs that are times: typed as 90s, 5min or 2h, wherever a value may come from, and numbers from there on."""

import copy
import json
import pickle
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.kit.few import few, slow
from wellfed.config.compose import compose
from wellfed.config.entry import main
from wellfed.config.hydra_session import open_hydra
from wellfed.config.knobs import entries
from wellfed.config.schema import EvaluateConfig, RunConfig, TuneRunConfig
from wellfed.errors import ConfigError

TIMES = {name: knob for name, knob in entries(TuneRunConfig).items() if knob.unit_s is not None}


def message(*overrides: str, config_name: str = "train") -> str:
    with pytest.raises(ConfigError) as raised:
        compose(overrides, config_name)
    return str(raised.value)


def test_these_knobs_are_times() -> None:
    """A new one is here by its name; no knob has such a name that is no time."""
    assert {name: knob.unit_s for name, knob in TIMES.items()} == {
        "loader.timeout_s": 1,
        "trainer.max_time_s": 1,
        "trainer.checkpoint_minutes": 60,
        "telemetry.interval_s": 1,
        "sweep.timeout_s": 1,
        "search.max_minutes": 60,
        "search.timeout_s": 1,
        "tune.max_minutes": 60,
    }
    assert not any(knob.unit_s for knob in entries(EvaluateConfig).values())


FORMS = {"2": None, "120s": 120, "2min": 120, "1h": 3600, "60000ms": 60}
"""What may be typed, in seconds; None = in the knob's own unit."""


@pytest.mark.parametrize("shift", few(range(len(FORMS)), 2))
def test_every_form_reads_and_is_a_number_in_the_knobs_own_unit(shift: int) -> None:
    forms = [*FORMS.items()] * 3
    chosen = dict(zip(TIMES, forms[shift:], strict=False))
    resolved = compose([f"{name}={typed}" for name, (typed, _) in chosen.items()], "tune").resolved
    for name, (_, seconds) in chosen.items():
        unit_s = TIMES[name].unit_s
        assert unit_s is not None
        group, _, key = name.partition(".")
        value = resolved[group][key]
        assert value == (2 if seconds is None else seconds / unit_s)
        assert type(value) is TIMES[name].type
        assert json.loads(json.dumps(value)) == value


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("trainer.max_time_s=soon", "must be a number > 0, a time as 90s, 5min, 2h, or null."),
        ("trainer.max_time_s=5mins", "trainer.max_time_s=5mins: must be a number > 0, a time as"),
        slow("trainer.max_time_s=5m", "trainer.max_time_s=5m: must be"),
        slow("trainer.max_time_s=0s", "trainer.max_time_s=0.0: must be > 0."),
        ("trainer.max_time_s=-5min", "trainer.max_time_s=-300.0: must be > 0."),
        slow("telemetry.interval_s=50ms", "telemetry.interval_s=0.05: must be >= 0.1 and <= 3600."),
        ("telemetry.interval_s=null", "telemetry.interval_s=null: must be a number >= 0.1 and <= 3600, a time as"),
        ("loader.timeout_s=1500ms", "must be a whole number >= 0, a time as 90s, 5min, 2h, or null."),
        slow("trainer.max_time_s=1e999h", "must be > 0"),
        ("trainer.max_steps=5min", "trainer.max_steps=5min: must be a whole number >= 1 or null."),
    ],
)
def test_what_is_no_time_is_told_with_the_forms(typed: str, said: str) -> None:
    found = message(typed, "gpu=42gb")
    assert said in found
    assert "2 faults" in found


def test_a_file_may_have_a_time_and_a_wrong_one_is_told_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "trainer").mkdir()
    file = tmp_path / "trainer" / "mine.yaml"
    file.write_text("max_epochs: 1\nmax_time_s: 5min\ncheckpoint_minutes: ${trainer.log_every_steps}\n")
    config = compose(["trainer=mine"], extra_dirs=[tmp_path]).config
    assert (config.trainer.max_time_s, config.trainer.checkpoint_minutes) == (300, 50)
    file.write_text("max_epochs: 1\nmax_time_s: 5mins\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml:2: trainer\.max_time_s=5mins: must be a number > 0, a time as"):
        compose(["trainer=mine"], extra_dirs=[tmp_path])


def test_copies_and_pickles_still_read_times() -> None:
    cfg = open_hydra().compose_config("train", ["trainer.max_time_s=5min"], None)
    for copied in (copy.deepcopy(cfg), copy.copy(cfg), pickle.loads(pickle.dumps(cfg))):
        assert copied.trainer.max_time_s == 300
        OmegaConf.update(copied, "trainer.max_time_s", "2h")
        assert copied.trainer.max_time_s == 7200
        copied.merge_with({"trainer": {"checkpoint_minutes": "30s"}})
        assert copied.trainer.checkpoint_minutes == 0.5


def test_axes_of_a_sweep_are_times_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    seen: list[float] = []

    def job(composed: object) -> int:
        config: RunConfig = composed.config  # type: ignore[attr-defined]
        seen.append(config.trainer.max_time_s or 0)
        return 0

    swept = ["-m", "hydra.sweep.dir=swept", "hydra/sweeper=basic", "hydra/launcher=basic"]
    assert main("train", job, [*swept, "trainer.max_time_s=90s,5min,120"]) == 0
    assert seen == [90, 300, 120]


def test_cfg_job_shows_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("train", lambda composed: 0, ["--cfg", "job", "trainer.max_time_s=2h", "loader.timeout_s=2min"]) == 0
    shown = capsys.readouterr().out
    assert "max_time_s: 7200.0" in shown
    assert "timeout_s: 120\n" in shown
