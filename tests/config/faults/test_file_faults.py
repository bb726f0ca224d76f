"""Faults of yaml files: file, line, key."""

import builtins
import os

import pytest

from tests.kit.few import few
from wellfed.config.compose import compose
from wellfed.config.faults.file_faults import show_file
from wellfed.errors import ConfigError


@pytest.fixture
def write(tmp_path):
    """Write a file of a user's folder; the faults that composing with it has."""

    def write_and_compose(path: str, text: str | bytes, *overrides: str):
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        group, _, option = path.removesuffix(".yaml").partition("/")
        with pytest.raises(ConfigError) as raised:
            compose([f"{group}={option}", *overrides], extra_dirs=[tmp_path])
        return raised.value.faults, file

    return write_and_compose


@pytest.mark.parametrize(
    ("text", "line", "problem", "way_out"),
    few(
        [
            (
                "memory_gib: 3\n\ttf32: true\n",
                ":2",
                "is not yaml at column 1: found character '\\t'",
                "Indent with blanks",
            ),
            ("memory_gib: 3\n   tf32: true\n", ":2", "is not yaml at column 8: mapping values", "Check indentation"),
            ("memory_gib: [3\n", ":2", "is not yaml", "Check indentation"),
            ("tf32: true\ntf32: false\n", ":2", "found duplicate key tf32", "Check indentation"),
            (b"\xff\xfe\x00", "", "is not UTF-8 text.", "Save it as UTF-8."),
            ("defaults: 3\n", "", "defaults must be a list (got int)", "Write 'knob: value' lines."),
            ("defaults:\n  - 3: 4\n", "", "has a defaults list that can't be read.", "Write '- group: option' lines"),
            (
                "# @package one two\ntf32: true\n",
                "",
                "Too many components in '@package one two'",
                "Write 'knob: value'",
            ),
            ("tf32: &a [*a]\n", "", "can't be used: maximum recursion depth", "Write 'knob: value' lines."),
        ],
        5,
    ),
)
def test_files_that_can_not_be_read(write, text, line, problem, way_out):
    (fault,), file = write("gpu/mine.yaml", text)
    assert fault.where == f"{file}{line}"
    assert problem in fault.problem
    assert way_out in fault.way_out
    assert len(str(fault)) < 600


def test_an_experiment_that_is_not_yaml_is_the_only_fault(write):
    (fault,), file = write("experiment/mine.yaml", "# @package _global_\nmemory:\n  {a: 1}\n  {b: 2}\n")
    assert fault.where == f"{file}:4"
    assert "is not yaml" in fault.problem


def test_a_file_without_permission(write, monkeypatch):
    real = builtins.open

    def refuse(file, *args, **kwargs):
        if str(file).endswith("mine.yaml"):
            raise PermissionError(13, "Permission denied", file)
        return real(file, *args, **kwargs)

    monkeypatch.setattr(builtins, "open", refuse)
    (fault,), file = write("gpu/mine.yaml", "tf32: true\n")
    assert fault.where == str(file)
    assert fault.problem == "can't be read: Permission denied."
    assert fault.way_out == "Check its permissions."


def test_every_key_of_a_file(write):
    text = "# mine\nmemory_gib: lots\ntf32: true\nmemory_gb: 3\nprecision: fp8\ncompile: null\n"
    faults, file = write("gpu/mine.yaml", text)
    assert [fault.where for fault in faults] == [
        f"{file}:2: gpu.memory_gib=lots",
        f"{file}:4: gpu.memory_gb=3",
        f"{file}:5: gpu.precision=fp8",
        f"{file}:6: gpu.compile=null",
    ]
    assert faults[0].problem == "must be a number > 0 or null."
    assert faults[1].way_out == "Did you mean gpu.memory_gib?"
    assert faults[3].problem.startswith("must be one of none, default")


def test_files_of_the_whole_configuration(write):
    text = "# @package _global_\nloader:\n  num_worker: 2\nseed: -3\n"
    faults, file = write("experiment/mine.yaml", text, "sede=3")
    assert [fault.where for fault in faults] == ["sede=3", f"{file}:3: loader.num_worker=2"]


def test_choices_inside_a_file(write):
    text = "# @package _global_\ndefaults:\n  - override /gpu: 99gb\nseed: 3\n"
    (fault,), _ = write("experiment/mine.yaml", text)
    assert "Could not find 'gpu/99gb'" in fault.problem
    assert "24gb" in fault.way_out


def test_a_file_that_lists_a_missing_one(write):
    (fault,), _ = write("gpu/mine.yaml", "defaults:\n  - no_such_base\ntf32: true\n")
    assert fault.where == "gpu=mine"
    assert "gpu/no_such_base" in fault.problem


@pytest.mark.parametrize("text", ["- tf32\n- compile\n", '"tf32"\n', "3: 4\n"])
def test_files_without_knobs(write, text):
    (fault,), file = write("gpu/mine.yaml", text)
    assert fault.where.startswith(str(file))


def test_a_hydra_section_of_a_file_is_checked_too(write):
    (fault,), _ = write("experiment/mine.yaml", "# @package _global_\nhydra:\n  no_such_entry: 3\n")
    assert "no_such_entry" in str(fault)


def test_a_stranger_at_the_top_of_a_file(write):
    (fault,), file = write("experiment/mine.yaml", "# @package _global_\nsede: 3\n")
    assert (fault.where, fault.way_out) == (f"{file}:2: sede=3", "Did you mean seed?")


def test_a_sound_hydra_section_is_no_fault(write):
    (fault,), _ = write("experiment/mine.yaml", "# @package _global_\nhydra: {job: {name: x}}\nseed: x\n")
    assert fault.where.endswith("seed=x")


def test_a_launcher_chosen_in_a_file_is_no_fault(write):
    text = "# @package _global_\ndefaults:\n  - override /hydra/launcher: basic\nseed: x\n"
    (fault,), _ = write("experiment/mine.yaml", text)
    assert fault.where.endswith("seed=x")


def test_files_are_shown_from_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert show_file(tmp_path / "configs" / "a.yaml") == os.path.join("configs", "a.yaml")
    assert show_file(tmp_path.parent / "a.yaml") == str(tmp_path.parent / "a.yaml")
