"""Faults of yaml files: file and key."""

import pytest

from tests.kit.few import few
from wellfed.config.compose import compose
from wellfed.errors import ConfigError, Fault


@pytest.fixture
def write(tmp_path):
    """Write a file of a user's folder; the fault that composing with it has, and the file."""

    def write_and_compose(path: str, text: str, *overrides: str) -> tuple[Fault, str]:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        group, _, option = path.removesuffix(".yaml").partition("/")
        with pytest.raises(ConfigError) as raised:
            compose([f"{group}={option}", *overrides], extra_dirs=[tmp_path])
        (fault,) = raised.value.faults
        return fault, str(file)

    return write_and_compose


@pytest.mark.parametrize(
    ("text", "problem", "way_out"),
    [
        ("memory_gib: 3\n\ttf32: true\n", "is not yaml at column 1: found character '\\t'", "Indent with blanks"),
        ("memory_gib: 3\n   tf32: true\n", "is not yaml at column 8: mapping values", "Check indentation"),
        ("tf32: true\ntf32: false\n", "found duplicate key tf32", "Check indentation"),
    ],
)
def test_files_that_are_not_yaml_are_named_with_the_line(write, text, problem, way_out):
    fault, file = write("gpu/mine.yaml", text)
    assert fault.where == f"{file}:2"
    assert problem in fault.problem
    assert way_out in fault.way_out


@pytest.mark.parametrize(
    ("text", "key", "problem", "way_out"),
    [
        ("memory_gb: 3\n", "gpu.memory_gb", "no such knob.", "Did you mean gpu.memory_gib?"),
        ("memory_gib: lots\n", "gpu.memory_gib", "must be a number > 0 or null.", "GPU memory budget"),
        ("precision: bf16\n", "gpu.precision", "must be one of auto", "Did you mean gpu.precision=bf16-mixed?"),
    ],
)
def test_a_key_that_the_schema_refuses_is_named_with_its_file(write, text, key, problem, way_out):
    fault, _ = write("gpu/mine.yaml", text)
    assert fault.where == f"gpu/mine.yaml: {key}"
    assert problem in fault.problem
    assert way_out in fault.way_out


def test_a_stranger_at_the_top_of_a_file(write):
    fault, _ = write("experiment/mine.yaml", "# @package _global_\nsede: 3\n", "sede=3")
    assert (fault.where, fault.way_out) == ("experiment/mine.yaml: sede", "Did you mean seed?")


def test_choices_inside_a_file(write):
    fault, _ = write("experiment/mine.yaml", "# @package _global_\ndefaults:\n  - override /gpu: 99gb\nseed: 3\n")
    assert "Could not find 'gpu/99gb'" in fault.problem
    assert "24gb" in fault.way_out


@pytest.mark.slow
def test_a_file_that_lists_a_missing_one(write):
    fault, _ = write("gpu/mine.yaml", "defaults:\n  - no_such_base\ntf32: true\n")
    assert "gpu/no_such_base" in fault.problem


@pytest.mark.parametrize("text", few(["- tf32\n- compile\n", '"tf32"\n', "defaults: 3\n"], 1))
def test_files_without_knobs_are_reported_in_hydras_words(write, text):
    fault, _ = write("gpu/mine.yaml", text)
    assert "gpu/mine" in str(fault)
    assert len(str(fault)) < 600


def test_a_hydra_section_of_a_file_is_checked_too(write):
    fault, _ = write("experiment/mine.yaml", "# @package _global_\nhydra:\n  no_such_entry: 3\n")
    assert "no_such_entry" in str(fault)
