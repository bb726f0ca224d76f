import shutil
from pathlib import Path

import pytest

from tests.template.commands import copy_of_the_template


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The template's repository; only for reading."""
    return copy_of_the_template(tmp_path_factory.mktemp("template") / "template")


@pytest.fixture
def own_template(template: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(template, tmp_path / "own_template"))
