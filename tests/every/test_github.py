"""What GitHub reads: workflows, templates, the notes of a release. `make check` holds the workflows to their schema."""

import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
FORMS = sorted(path for path in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")


def read(path: Path) -> dict[Any, Any]:
    return dict(yaml.safe_load(path.read_text(encoding="utf-8")))


def jobs(path: Path) -> dict[str, dict[str, Any]]:
    return dict(read(path)["jobs"])


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_by_commit(path: Path):
    used = re.findall(r"^\s*(?:- )?uses: (.*)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert used
    for action in used:
        if action.startswith("./"):
            assert (ROOT / action).is_file()
        else:
            assert re.fullmatch(r"[\w-]+/[\w/.-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action), action


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_may_only_read_unless_a_job_says_why(path: Path):
    workflow = read(path)
    most_minutes = 90 if "schedule" in workflow[True] else 30  # YAML reads the key `on` as true
    assert workflow["permissions"] == {"contents": "read"}
    assert "concurrency" in workflow
    for job in workflow["jobs"].values():
        for line in re.findall(r"^ +\w+: write.*$", path.read_text(encoding="utf-8"), flags=re.MULTILINE):
            assert "#" in line, line
        assert "uses" in job or job["timeout-minutes"] <= most_minutes
        for step in job.get("steps", ()):
            if "actions/checkout" in step.get("uses", ""):
                assert step["with"]["persist-credentials"] is False


def test_nothing_that_others_may_write_is_pasted_into_a_shell():
    for path in WORKFLOWS:
        for job in jobs(path).values():
            for step in job.get("steps", ()):
                assert "${{" not in step.get("run", ""), step


def test_the_oldest_python_is_tested():
    oldest = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"].removeprefix(">=")
    tested = jobs(GITHUB / "workflows" / "ci.yml")["test"]["strategy"]["matrix"]["python"]
    assert tested[0] == oldest
    assert len(tested) >= 2


def test_what_workflows_type_is_there():
    for path in WORKFLOWS:
        for job in jobs(path).values():
            for step in job.get("steps", ()):
                for target in re.findall(r"^make ([\w-]+)", step.get("run", "")):
                    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, timeout=30)
                    assert done.returncode == 0, done.stderr
                for script in re.findall(r"^python (\S+)", step.get("run", "")):
                    assert (ROOT / script).is_file()


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_forms_ask_for_each_thing_once(path: Path):
    form = read(path)
    assert form["name"]
    assert form["description"]
    ids = [field["id"] for field in form["body"]]
    assert len(set(ids)) == len(ids)
    for page in re.findall(r"docs/\w+\.md", path.read_text(encoding="utf-8")):
        assert (ROOT / page).is_file(), page


def test_a_bug_report_asks_for_what_tells_most():
    fields = {field["id"]: field for field in read(GITHUB / "ISSUE_TEMPLATE" / "bug.yml")["body"]}
    assert "python -m wellfed doctor" in fields["doctor"]["attributes"]["label"]
    assert "run.json" in fields["record"]["attributes"]["label"]


def notes_of(tag: str, changelog: str, version: str) -> str:
    spec = importlib.util.spec_from_file_location("release_notes", GITHUB / "release_notes.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return str(module.notes(tag, changelog, version))


CHANGELOG = """# Changelog

## [Unreleased]

- later

## [1.2.0] - 2027-01-31

### Added

- a thing

## [1.1.0]

[1.2.0]: https://example.org
"""


def test_the_notes_of_a_release_are_its_section():
    assert notes_of("v1.2.0", CHANGELOG, "1.2.0") == "### Added\n\n- a thing\n"


@pytest.mark.parametrize(
    ("tag", "version", "reason"),
    [
        ("v1.2.1", "1.2.0", "the tag is v1.2.1, and pyproject.toml says 1.2.0"),
        ("1.2.0", "1.2.0", "the tag is 1.2.0"),
        ("v1.1.0", "1.1.0", r"nothing under ## \[1.1.0\]"),
        ("v1.2", "1.2", r"nothing under ## \[1.2\]"),
    ],
)
def test_a_release_that_does_not_add_up_is_refused(tag: str, version: str, reason: str):
    with pytest.raises(ValueError, match=reason):
        notes_of(tag, CHANGELOG, version)


def test_the_script_ends_with_the_reason():
    command = [sys.executable, str(GITHUB / "release_notes.py"), "v0.0.0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    assert done.stderr.startswith("no release: the tag is v0.0.0, and pyproject.toml says ")
