"""The stand-in answers to the names and arguments of the real module."""

import inspect

import pynvml
import pytest

from tests.fake_nvml.scripted import ScriptedNvml

FUNCTIONS = [name for name in vars(ScriptedNvml) if name.startswith("nvml") and callable(getattr(ScriptedNvml, name))]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_takes_the_arguments_of_the_real_function(name):
    real = inspect.signature(inspect.unwrap(getattr(pynvml, name)))
    scripted = inspect.signature(getattr(ScriptedNvml, name))
    assert list(scripted.parameters)[1:] == list(real.parameters)


def test_found_functions_and_constants_are_real():
    assert len(FUNCTIONS) >= 12
    assert ScriptedNvml.nvmlMemory_v2 == pynvml.nvmlMemory_v2
