"""Where tests for cards run: those marked ``simulated`` in a process of their own with simulated cards, those marked
``gpu`` on a real card, and where there is none on a simulated one too."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from functools import cache
from pathlib import Path

import pytest
from _pytest.runner import CallInfo

from tests.end_to_end.commands import Done, run
from tests.fake_cuda.machine import INSIDE, FakeCuda, compile_driver
from tests.kit.required_tools import find_tool

ROOT = Path(__file__).parents[2]
ORDINARY = {"mib": 8192, "context_mib": 300, "slowdown": 3}
"""The card of a test marked ``gpu``."""


@cache
def simulated_machine() -> FakeCuda:
    """Compiled when first asked for; skips the test where there can be none."""
    import torch

    if sys.platform != "linux":
        pytest.skip("the simulated cards are a Linux library")
    if torch.version.cuda is not None or torch.version.hip is not None:
        pytest.skip(f"torch {torch.__version__} has a device of its own where the simulated cards would be")
    find_tool("c++", os.environ.get("WELLFED_REQUIRE", ""))
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        pytest.skip("needs Python's headers: apt-get install python3-dev")
    compile_for(torch.__version__)
    return FakeCuda()


def compile_for(version: str) -> None:
    """Have the driver compiled for this torch. It uses torch's own C++, which changes: it is written for the one that
    constraints.txt pins, and others may do; the test is skipped where they don't.

    Raises:
        RuntimeError: it can't be compiled for the one that is pinned.
    """
    try:
        compile_driver()
    except RuntimeError as error:
        pins = re.findall(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
        if version.partition("+")[0] in pins:
            raise
        reason = str(error).strip().splitlines()[-1]
        pytest.skip(f"the simulated cards are written for torch {pins[0]}; not compiled for {version}: {reason}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Runs the test there and hands its reports on; None = it is not one of these, or this is that process."""
    marker = item.get_closest_marker("simulated") or item.get_closest_marker("gpu")
    if marker is None or os.environ.get("FAKE_CUDA_DEVICES") or (marker.name == "gpu" and _has_gpu()):
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    cards = dict(marker.kwargs) if marker.name == "simulated" else ORDINARY
    for report in _reports(item, dict(cards)):
        item.ihook.pytest_runtest_logreport(report=report)
    item.session._setupstate.teardown_exact(nextitem)  # what earlier tests of the file have set up
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _reports(item: pytest.Item, cards: dict[str, object]) -> list[pytest.TestReport]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "reports.json")
        call = CallInfo.from_call(lambda: _run(item.nodeid, path, cards), when="call", reraise=(KeyboardInterrupt,))
        if call.excinfo is not None:
            return [pytest.TestReport.from_item_and_call(item, call)]
        reports = [
            item.config.hook.pytest_report_from_serializable(config=item.config, data=data)
            for data in json.loads(path.read_text())
        ]
    return [report for report in reports if report is not None]


def _run(nodeid: str, path: Path, cards: dict[str, object]) -> None:
    """Leaves the test's reports; skips or fails where it could not be run."""
    more = {"timeout_s": cards.pop("timeout_s")} if "timeout_s" in cards else {}
    try:
        done: Done = run(INSIDE, nodeid, str(path), cwd=ROOT, **simulated_machine().environment(**cards), **more)
    except subprocess.TimeoutExpired as error:
        pytest.fail(f"the test took more than {error.timeout:g} s", pytrace=False)
    if not path.exists() or "teardown" not in path.read_text():
        pytest.fail(f"the test's process ended with {done.code} before the test did:\n{done.text}", pytrace=False)
