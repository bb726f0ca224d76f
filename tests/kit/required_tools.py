"""Programs that some tests need and a machine may lack: skip with the way out, or fail where they are required."""

import os
import shutil
import sys
from pathlib import Path

import pytest

TOOLS = {
    "cc": (("cc", "gcc", "clang"), "apt-get install gcc libc6-dev"),
    "c++": (("c++", "g++", "clang++"), "apt-get install g++"),
    "uv": (("uv",), "pip install uv"),
    "pipx": (("pipx",), "pip install pipx"),
    "chromium": (("chromium", "chromium-browser", "google-chrome"), "apt-get install chromium"),
}
"""Name in WELLFED_REQUIRE -> (programs, any of which will do; how to get one)."""


def find_tool(name: str, required: str) -> Path:
    """The program, or the end of the test: a skip, or a failure if ``name`` is in the comma list ``required``.

    Who requires ``cc`` requires compilers, of C++ too.
    """
    programs, install = TOOLS[name]
    folders = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    found = next(filter(None, (shutil.which(program, path=folders) for program in programs)), None)
    if found is not None:
        return Path(found)
    reason = f"needs {' or '.join(programs)}: {install}"
    if ("cc" if name == "c++" else name) in [word.strip() for word in required.split(",")]:
        pytest.fail(f"{reason} (WELLFED_REQUIRE={required} makes this a failure)", pytrace=False)
    pytest.skip(reason)
