import typing

import pytest

from wellfed import errors
from wellfed.errors import ConfigError, DataError, Fault, OutOfMemoryExhausted, WellfedError


def test_every_fault_is_in_the_message():
    one, two = Fault("gpu", "is wrong.", "Set gpu=auto."), Fault("seed", "is negative.", "")
    assert str(ConfigError([one])) == "1 fault in the configuration; nothing was run.\n  - gpu: is wrong. Set gpu=auto."
    assert str(ConfigError([one, two])) == (
        "2 faults in the configuration; nothing was run.\n  - gpu: is wrong. Set gpu=auto.\n  - seed: is negative."
    )
    assert ConfigError([one, two]).faults == (one, two)


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("config", ConfigError([])),
        ("data", DataError("x")),
        ("device_oom", OutOfMemoryExhausted("x")),
        ("code", WellfedError("x")),
    ],
)
def test_each_error_has_its_kind_of_the_record(kind, error):
    assert error.kind == kind
    assert error.kind in typing.get_args(errors.ErrorKind)


def test_exit_codes_are_those_of_the_commands():
    assert (errors.EXIT_OK, errors.EXIT_FAILED, errors.EXIT_NOTHING_RUN, errors.EXIT_OUT_OF_MEMORY) == (0, 1, 2, 3)
    assert (errors.EXIT_INTERRUPTED, errors.EXIT_TERMINATED) == (128 + 2, 128 + 15)
