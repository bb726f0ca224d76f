"""Tests the promises of every workload: a pytest plugin and a class of tests for a project.

Nothing else of the engine imports pytest. A project has two files:

- ``tests/conftest.py``: ``pytest_plugins = ["wellfed.testing"]``;
- ``tests/test_workloads.py``: ``class TestWorkloads(WorkloadContract)`` with a docstring.

Start from `workload_contract.WorkloadContract` (the tests) and `made_workload.MadeWorkload` (what they test).
"""

from __future__ import annotations

import os

import pytest

from wellfed import project
from wellfed.testing.made_workload import MadeWorkload
from wellfed.testing.workload_contract import WorkloadContract

__all__ = ["WorkloadContract"]


def pytest_configure(config: pytest.Config) -> None:
    """Sets the project for tests that change the folder, and for programs that they start."""
    config.addinivalue_line("markers", "slow: takes seconds to minutes; leave out with -m 'not slow'")
    if (config.rootpath / "configs" / "train.yaml").is_file():
        os.environ.setdefault(project.VARIABLE, str(config.rootpath))
    project.add_sources()


@pytest.fixture(scope="class")
def made_workload(
    request: pytest.FixtureRequest, workload: str, tmp_path_factory: pytest.TempPathFactory
) -> MadeWorkload:
    """Builds the workload of its yaml once for all its tests."""
    words = request.cls.words_for(workload, tmp_path_factory.mktemp("workload"))
    made = MadeWorkload(workload, words)
    if made.parts.guest is not None:
        pytest.skip("Lightning's Trainer makes the steps")
    return made
