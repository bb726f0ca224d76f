import shlex

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st

from wellfed.config.faults.override_faults import choice_fault, read_overrides
from wellfed.config.hydra_internals import searched_files
from wellfed.config.hydra_session import open_hydra


def read_one(text: str, *, multirun: bool = False):
    (typed,) = read_overrides([text], multirun=multirun)
    return typed


@pytest.mark.parametrize(
    "text", ["gpu=24gb", "~gpu", "+a.b=1", "a=[1,2]", "a={b: 1}", "a='x,y'", "a=", "hydra/launcher=x"]
)
def test_what_can_be_read(text):
    typed = read_one(text)
    assert typed.fault is None
    assert typed.parsed is not None


@pytest.mark.parametrize(
    ("text", "several"), [("a=1,2", True), ("a=choice(1,2)", True), ("a=range(3)", True), ("a=1", False)]
)
def test_several_values_need_multirun(text, several):
    assert (read_one(text).fault is not None) == several
    assert read_one(text, multirun=True).fault is None


def test_one_that_can_not_be_read_does_not_hide_the_next():
    faults = [typed.fault is not None for typed in read_overrides(["foo", "a=1", "b=[", "=3"], multirun=False)]
    assert faults == [True, False, True, True]


class WithoutPlugins:
    """A search path that has what comes with Hydra alone."""

    def get_group_options(self, group, results_filter):
        return ["basic"]

    def config_exists(self, path):
        return path == "hydra/launcher/basic"


@pytest.mark.parametrize(("name", "extra"), [("ray", "ray"), ("submitit_slurm", "slurm"), ("submitit_local", "slurm")])
def test_a_launcher_that_is_not_installed_is_told_with_its_extra(name, extra):
    fault = choice_fault(read_one(f"hydra/launcher={name}").parsed, WithoutPlugins())
    assert fault.problem == f"needs the extra {extra}, which is not installed."
    assert fault.way_out == f"Install it: python -m pip install 'wellfed[{extra}]'."


@given(st.text(st.sampled_from("ab=[](){},: '\"\\$#/.!é"), max_size=12))
def test_any_value_is_read_or_told_and_the_quoted_form_works(value):
    text = f"resume={value}"
    typed = read_one(text)
    assert (typed.parsed is None) <= (typed.fault is not None)
    if typed.fault is not None and "uote" in typed.fault.way_out:
        quoted = typed.fault.way_out.partition("uote")[2].partition(": ")[2]
        (argument,) = shlex.split(quoted)
        parsed = OverridesParser.create().parse_override(argument)
        assert parsed.value() == value


@given(st.text(st.sampled_from("ab=[](){},: '\"\\$+~.@"), max_size=8))
def test_anything_typed_gets_an_answer(text):
    typed = read_one(text)
    assert (typed.parsed is None) <= (typed.fault is not None)
    if typed.fault is not None:
        assert typed.fault.where == text
        assert typed.fault.way_out


@pytest.mark.parametrize("text", ["gpu.compile=1e400,choice(a,b)", "sweep.retry=range(3),[{a: 1}]"])
def test_an_axis_whose_values_can_not_be_read(text):
    typed = read_one(text, multirun=True)
    assert typed.fault is not None
    assert typed.fault.where == text
    assert "an axis that can't be read" in typed.fault.problem


def test_an_axis_may_take_all_options_of_a_group():
    (typed,) = read_overrides(["loader=glob(b*)"], multirun=True, loader=open_hydra().config_loader)
    assert typed.fault is None
    assert typed.parsed is not None
    assert list(typed.parsed.sweep_string_iterator()) == ["balanced", "baseline"]


@pytest.mark.parametrize(
    ("axis", "problem"),
    [
        ("callbacks=ema,[early_stopping,ema],none", None),
        ("callbacks=ema,[early_stopping,emma]", "there is no option emma."),
        ("callbacks=[emma]", "there is no option emma."),
    ],
)
def test_options_that_go_together_are_held_against_the_files_each(axis: str, problem: str | None) -> None:
    loader = open_hydra().config_loader
    (typed,) = read_overrides([axis], multirun=True, loader=loader)
    assert typed.parsed is not None
    fault = choice_fault(typed.parsed, searched_files(loader, "train", []))
    assert (fault and fault.problem) == problem
