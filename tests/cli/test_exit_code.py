"""What a command without a record says of its end, and its exit code."""

import pytest
import torch

from wellfed.cli.exit_code import report_error, verdict_code
from wellfed.errors import MOST_FRAMES, ConfigError, DataError, Fault, OutOfMemoryExhausted


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ConfigError([Fault("gpu", "is no card.", "Name one.")]), 2, "gpu: is no card. Name one."),
        (DataError("line 3 is torn"), 2, "line 3 is torn"),
        (OutOfMemoryExhausted("tried all"), 3, "tried all\naccelerator=cpu"),
        (torch.OutOfMemoryError("CUDA out of memory."), 3, "CUDA out of memory.\naccelerator=cpu"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_message_alone_and_what_can_be_typed(error, code, message, capsys):
    assert report_error(error, way_on="accelerator=cpu does without it.") == code
    out, err = capsys.readouterr()
    assert message in err
    assert "resume" not in err
    assert not out
    if code == 3:
        assert err.endswith("accelerator=cpu does without it.\n")


def test_host_memory_has_the_exit_code_of_memory_and_no_way_on_with_another_card(capsys):
    assert report_error(OutOfMemoryExhausted("tried all", "host_oom"), way_on="accelerator=cpu does without it.") == 3
    assert capsys.readouterr().err == "tried all\n"


def test_a_bug_is_raised():
    error = KeyError("price")
    with pytest.raises(KeyError) as raised:
        report_error(error)
    assert raised.value is error


def test_a_users_own_error_shows_their_frames(capsys):
    with pytest.raises(RuntimeError) as raised:
        torch.nn.Sequential(torch.nn.Linear(2, 2))(torch.ones(3, 5))
    assert report_error(raised.value) == 1
    err = capsys.readouterr().err
    assert err.startswith(f'Traceback (most recent call last):\n  File "{__file__}"')
    assert "RuntimeError: mat1 and mat2 shapes cannot be multiplied" in err
    assert err.count('  File "') <= 1 + MOST_FRAMES


def test_all_are_raised_with_full_errors(monkeypatch):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(DataError):
        report_error(DataError("line 3 is torn"))


@pytest.mark.parametrize("code", [0, 1, 2, 130])
def test_a_verdict_keeps_its_exit_code(code):
    assert verdict_code(lambda: code) == code


@pytest.mark.parametrize("error", [DataError("line 3 is torn"), OSError(28, "No space left on device"), KeyError("x")])
def test_an_error_is_no_verdict(error, capsys):
    def fail():
        raise error

    assert verdict_code(fail) == 2
    assert str(error) in capsys.readouterr().err
