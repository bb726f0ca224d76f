import shlex
from functools import cache

import pytest

from wellfed.config.compose import compose
from wellfed.config.entry import help_text
from wellfed.config.hydra_session import open_hydra
from wellfed.errors import ConfigError


@cache
def train_help() -> str:
    return help_text(open_hydra(), "train", ["loader=baseline"])


def examples(text: str, script: str) -> list[list[str]]:
    lines = [line.strip() for line in text.splitlines()]
    return [shlex.split(line)[2:] for line in lines if line.startswith(f"python src/{script}")]


def test_groups_with_options_and_the_choice():
    assert "  gpu         8gb, 16gb, 24gb, 80gb, auto*, cpu" in train_help().splitlines()
    assert "baseline*" in train_help()
    assert "debug       limit, one_step, overfit, profiler" in train_help()
    assert "$" not in train_help()


@pytest.mark.parametrize("name", ["train", pytest.param("tune", marks=pytest.mark.slow)])
def test_groups_come_as_in_the_primary_config(name: str) -> None:
    lines = help_text(open_hydra(), name, []).partition("chosen now):")[2].splitlines()
    groups = [line.split()[0] for line in lines if line.startswith("  ") and line[2:3].isalpha()]
    assert groups[:5] == ["gpu", "loader", "memory", "workload", "trainer"]
    assert groups.index("experiment") < groups.index("debug")


def test_it_is_short_and_tells_where_to_read_on():
    assert len(train_help().splitlines()) < 35
    assert max(map(len, train_help().splitlines())) <= 130
    for words in ("--cfg job", "resume=auto", "wellfed doctor", "wellfed.config.files.knobs_page", "README.md"):
        assert words in train_help()


def test_the_examples_compose():
    plain = [words for words in examples(train_help(), "train.py") if "-m" not in words]
    assert len(examples(train_help(), "train.py")) == 5
    assert len(plain) == 2
    for words in plain:
        assert compose(words).overrides == tuple(words)


@pytest.mark.slow
def test_every_point_of_the_multirun_examples_composes():
    multiruns = [words[1:] for words in examples(train_help(), "train.py") if "-m" in words]
    assert len(multiruns) == 3
    for words in multiruns:
        (axis,) = [word for word in words if "," in word]
        group, _, options = axis.partition("=")
        if options.startswith("interval("):
            knob, start = group, options.removeprefix("interval(").partition(",")[0]
            assert compose([f"{knob}={start}"]).config.workload.optimizer["lr"] == float(start)
            continue
        for option in options.split(","):
            assert compose([f"{group}={option}", *(word for word in words if word != axis)]).choices[group] == option


def test_evaluation_has_its_own():
    text = help_text(open_hydra(), "evaluate", [])
    assert "train.py" not in text
    assert [compose(words, "evaluate").config.checkpoint for words in examples(text, "evaluate.py")] == [None, "last"]


def test_a_tune_has_its_own_with_its_budget_first_and_the_groups_of_a_run():
    text = help_text(open_hydra(), "tune", ["tune.max_minutes=7", "gpu=24gb"])
    assert "at most 7" in text.splitlines()[0]
    assert "24gb*" in text
    found = examples(text, "tune.py")
    assert len(found) == 3
    for words in found:
        assert compose(words, "tune").config.tune.max_trials == 20


def test_a_faulty_one_is_told():
    with pytest.raises(ConfigError, match="gpu=42gb"):
        help_text(open_hydra(), "train", ["gpu=42gb"])
