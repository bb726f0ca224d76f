"""Runs one test in this process, which has simulated cards: ``inside.py <test id> <file for its reports>``."""

import atexit
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


class Reports:
    """Writes what pytest has to say of a test, for the process that asked."""

    def __init__(self, path: Path, config: pytest.Config | None = None) -> None:
        self._path, self._config = path, config
        self._found: list[Any] = []

    def pytest_configure(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        assert self._config is not None
        self._found.append(self._config.hook.pytest_report_to_serializable(config=self._config, report=report))
        self._path.write_text(json.dumps(self._found))


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
    options = ["-q", "-m", "", "-p", "no:cacheprovider", "--rootdir", str(ROOT)]
    # What a copy of a warm Python has imported can't be rewritten; it holds no tests.
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # hypothesis alone takes longer than most tests
    code = pytest.main([sys.argv[1], *options], plugins=[Reports(Path(sys.argv[2]))])
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # Python would take apart all that it has imported, which takes twice as long as most tests
