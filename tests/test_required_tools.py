import sys
from pathlib import Path

import pytest

from tests.kit import required_tools
from tests.kit.required_tools import find_tool


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        required_tools,
        "TOOLS",
        {"here": (("nowhere-1", sys.executable), "echo"), "gone": (("nowhere-1", "nowhere-2"), "apt-get install gone")},
    )


@pytest.mark.usefixtures("tools")
@pytest.mark.parametrize("required", ["", "here,gone"])
def test_any_of_the_programs_will_do(required: str):
    assert find_tool("here", required) == Path(sys.executable)


@pytest.mark.usefixtures("tools")
@pytest.mark.parametrize("required", ["", "here", "gone-not"])
def test_a_missing_program_skips_with_the_way_to_install_it(required: str):
    with pytest.raises(pytest.skip.Exception, match="needs nowhere-1 or nowhere-2: apt-get install gone"):
        find_tool("gone", required)


@pytest.mark.usefixtures("tools")
@pytest.mark.parametrize("required", ["gone", "here, gone"])
def test_a_missing_program_that_is_required_fails(required: str):
    with pytest.raises(pytest.fail.Exception, match="WELLFED_REQUIRE"):
        find_tool("gone", required)
