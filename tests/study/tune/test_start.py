"""What may be typed for a tune, and what its start and its trials are of it."""

import pytest

from wellfed.config.schema import RunConfig, TelemetryConfig
from wellfed.errors import ConfigError
from wellfed.study.tune.start import expand, of_the_start, of_trials


def test_the_words_stay_and_paths_are_quoted() -> None:
    words = ["gpu=24gb", "tune.rounds=3", "resume=null", "sweep=null", "paths.log_dir=my logs", "loader.skip_ids=[1,2]"]
    assert expand(words, lambda _: None) == [*words[:4], "paths.log_dir='my logs'", words[5]]


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("resume=auto", "is about one training"),
        ("sweep=quick", "names a grid"),
        ("search=optuna", "is about a search of whole trainings, and tune times short trials"),
        ("sweep.name=mine", r"has no effect on a tune\. Write tune.name=<name>"),
        ("sweep.fail_fast=true", "has no effect on a tune"),
        ("workload.model.dim=32,64", r"a tune has one start\. Write one value .* workload.model.dim=\[32,64\]"),
        ("seed=range(3)", "a tune has one start"),
    ],
)
def test_what_has_no_meaning_is_refused(word: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        expand(["gpu=8gb", word], lambda _: None)


@pytest.mark.parametrize("flag", ["--config-name=mine", "-cn=mine"])
def test_another_primary_configuration_is_refused(monkeypatch: pytest.MonkeyPatch, flag: str) -> None:
    monkeypatch.setattr("wellfed.study.tune.start.typed_arguments", lambda: ["gpu=8gb", flag])
    with pytest.raises(ConfigError, match=rf"{flag}: .* experiment=<name>"):
        expand(["gpu=8gb"], lambda _: None)


def test_the_start_has_no_word_of_the_tune() -> None:
    words = ["gpu=24gb", "tune.rounds=3", "+tune.x=1", "sweep.trial_steps=40", "workload.data.tune=1"]
    assert of_the_start(words) == ("gpu=24gb", "sweep.trial_steps=40", "workload.data.tune=1")


def test_trials_are_watched_unless_that_was_turned_off_by_hand() -> None:
    watched, not_watched = RunConfig(), RunConfig(telemetry=TelemetryConfig(enabled=False))
    assert of_trials(["experiment=x"], watched) == ("experiment=x",)
    assert of_trials(["experiment=x"], not_watched) == ("experiment=x", "telemetry=default")
    for word in ("telemetry=none", "telemetry.enabled=false"):
        assert of_trials([word], not_watched) == (word,)
