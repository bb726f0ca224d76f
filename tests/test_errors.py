import importlib.util
import os
import pickle
import re
import signal
import subprocess
import sys
import traceback
import typing
from pathlib import Path

import pytest

from wellfed import errors
from wellfed.config.compose import compose
from wellfed.errors import (
    EXIT_NOTHING_RUN,
    ConfigError,
    DataError,
    Fault,
    OutOfMemoryExhausted,
    WellfedError,
    in_environment,
    shortened,
)
from wellfed.process import exit_code_of


def test_every_fault_is_in_the_message():
    one, two = Fault("gpu", "is wrong.", "Set gpu=auto."), Fault("seed", "is negative.", "")
    assert str(ConfigError([one])) == "1 fault in the configuration; nothing was run.\n  - gpu: is wrong. Set gpu=auto."
    assert str(ConfigError([one, two])) == (
        "2 faults in the configuration; nothing was run.\n  - gpu: is wrong. Set gpu=auto.\n  - seed: is negative."
    )
    assert ConfigError([one, two]).faults == (one, two)
    sent = pickle.loads(pickle.dumps(ConfigError([one, two])))  # by a worker process
    assert (str(sent), sent.faults) == (str(ConfigError([one, two])), (one, two))


@pytest.mark.parametrize(
    "typed",
    [
        "+tags.u=https://bob:urlpw991@h/x",
        "+tags={password:urlpw991}",
        "+tags.password=urlpw991",
        "+logger.api_key=urlpw991",
        "logger.tag=sk_live_urlpw991urlpw",
        "workload.data.password=ur(lpw991",
    ],
)
def test_a_faulty_override_is_shown_without_its_secret(typed):
    with pytest.raises(ConfigError) as caught:
        compose([typed])
    assert "pw991" not in str(caught.value)
    assert "***" in str(caught.value)


def test_rules_that_are_broken_are_faults_of_one_error():
    ConfigError.check("workload.model", ("lr", 0.1, True, "is not above 0", "lr=0.01 or so"))
    with pytest.raises(ConfigError) as raised:
        ConfigError.check(
            "workload.model",
            ("lr", -1, False, "is not above 0", "lr=0.01 or so"),
            ("dim", 8, True, "is below 1", "dim=8"),
            ("text", "x", False, "is neither a nor b", "text=a"),
        )
    assert [str(fault) for fault in raised.value.faults] == [
        "workload.model.lr: -1 is not above 0. Write lr=0.01 or so.",
        "workload.model.text: 'x' is neither a nor b. Write text=a.",
    ]


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
    assert errors.EXIT_INTERRUPTED == exit_code_of(signal.SIGINT) == 128 + 2


THEIRS = """
import json, torch

class Net(torch.nn.Module):
    def forward(self, x):
        return json.loads(x) if isinstance(x, str) else deeper(lambda: self.also(x), 3)

    def also(self, x):
        try:
            return torch.nn.functional.linear(x, torch.ones(3, 7))
        except RuntimeError as error:
            raise ValueError("mine") from error

def deeper(call, times):
    return call() if times == 0 else deeper(call, times - 1)
"""


def caught(folder: Path, given: typing.Any) -> BaseException:
    """The error of a user's module that is called from deep within installed code."""
    (folder / "theirs.py").write_text(THEIRS)
    spec = importlib.util.spec_from_file_location("theirs", folder / "theirs.py")
    assert spec is not None
    assert spec.loader is not None
    theirs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(theirs)
    try:
        theirs.torch.nn.Sequential(theirs.torch.nn.Sequential(theirs.Net()))(given)
    except Exception as error:  # noqa: BLE001
        return error.with_traceback(error.__traceback__.tb_next)  # without this test's own frame
    raise AssertionError


def files(text: str) -> list[str]:
    return [Path(line.split('"')[1]).name for line in text.splitlines() if line.startswith('  File "')]


def test_a_shown_traceback_begins_with_the_users_frames(tmp_path):
    import torch

    error = caught(tmp_path, torch.ones(2, 5))
    assert files("".join(traceback.format_exception(error)))[1] == "module.py"
    text = shortened(error, "all are in train.log")
    assert text.startswith("Traceback (most recent call last):\n")
    cause, own = text.split("The above exception was the direct cause")
    assert set(files(own)) == {"theirs.py"}
    assert files(cause)[0] == "theirs.py"
    assert "return torch.nn.functional.linear(x, torch.ones(3, 7))" in cause
    assert "ValueError: mine\n(" in own
    assert text.endswith("frames of libraries are left out: all are in train.log)\n")


def test_below_the_users_frames_the_last_five_of_others_are_shown(tmp_path):
    found = files(shortened(caught(tmp_path, "{no json"), "x"))
    assert found[0] == "theirs.py"
    assert len(found) <= 1 + errors.MOST_FRAMES
    assert found[-1] == "decoder.py"


def test_an_error_without_any_frame_of_the_users_shows_the_last_five():
    try:
        typing.get_type_hints(type("X", (), {"__annotations__": {"a": "no such thing"}}))
    except SyntaxError as error:
        text = shortened(error.with_traceback(error.__traceback__.tb_next), "x")
    assert 0 < len(files(text)) <= errors.MOST_FRAMES + 1  # and the line that is no Python


def test_a_short_traceback_is_shown_as_it_is():
    error = ValueError("alone")
    assert shortened(error, "x") == "ValueError: alone\n"


@pytest.mark.parametrize(
    ("file", "is_theirs"),
    [
        (errors.__file__, False),
        (pytest.__file__, False),
        (typing.__file__, False),
        ("<frozen importlib._bootstrap>", False),
        (str(Path(errors.__file__).parents[1] / "train.py"), False),
        (str(Path(errors.__file__).parents[1] / "workloads" / "recsys" / "model.py"), True),
        (str(Path(errors.__file__).parents[1] / "wellfed_mine" / "model.py"), True),
        ("model.py", True),
        # A virtual environment may see the packages of another one.
        ("/elsewhere/lib/python3.11/site-packages/library/code.py", False),
        ("/usr/lib/python3/dist-packages/library/code.py", False),
    ],
)
def test_whose_a_file_is(file, is_theirs):
    assert errors.is_the_users(file) is is_theirs


ENTRIES = [["src/train.py"], ["src/tune.py"], ["src/evaluate.py"], ["-m", "wellfed", "plan"]]


@pytest.mark.parametrize("command", ENTRIES, ids=" ".join)
def test_without_the_environment_one_line_says_how_to_get_it(command: list[str]) -> None:
    """-S: without site-packages, so that hydra can't be found."""
    root = Path(__file__).parents[1]
    environment = {"PYTHONPATH": str(root / "src"), "PATH": os.environ["PATH"]}
    done = subprocess.run(
        [sys.executable, "-S", *command], cwd=root, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == EXIT_NOTHING_RUN
    (line,) = done.stderr.splitlines()
    assert re.match(r"The package (hydra|yaml|omegaconf|numpy|rich) is not installed for .*python", line)
    assert "make train" in line


def test_a_module_of_the_users_own_that_is_missing_is_not_hidden() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_module_of_mine"), in_environment():
        import no_such_module_of_mine  # type: ignore[import-not-found]  # noqa: F401
