"""What is installed and loaded from elsewhere: pinned actions, wheels, weights-only checkpoints, no pickles."""

import ast
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
SOURCES = sorted([*(ROOT / "src").rglob("*.py"), *(ROOT / "tools").glob("*.py"), *(ROOT / "benchmarks").glob("*.py")])
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PICKLES = {
    "data/backends/shared_blocks.py",
    "data/backends/process_backend.py",
    "run/ranks/exchange.py",
    "testing/workload_contract.py",
    "watch/ranks_of_script.py",
}
"""Files that may unpickle what another process of the same run has sent: SECURITY.md, "What is trusted"."""


def calls(name: str) -> list[tuple[Path, ast.Call]]:
    """Returns the calls of a function of a module, such as ``torch.load``."""
    texts = {path: path.read_text(encoding="utf-8") for path in SOURCES}
    return [
        (path, node)
        for path, text in texts.items()
        if name in text
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == name
    ]


def keyword(call: ast.Call, name: str) -> str | None:
    return {each.arg: ast.unparse(each.value) for each in call.keywords}.get(name)


def test_nothing_that_is_loaded_runs_code() -> None:
    loads = calls("torch.load")
    assert loads
    others = [
        (path.name, keyword(call, "weights_only")) for path, call in loads if keyword(call, "weights_only") != "True"
    ]
    assert others == [("checkpoint_values.py", "not trusted")]  # trainer.trusted_checkpoints
    assert not calls("torch.jit.load") + calls("torch.package.PackageImporter")
    assert all(keyword(call, "allow_pickle") in (None, "False") for _, call in calls("np.load"))
    assert not calls("yaml.load") + calls("yaml.unsafe_load") + calls("yaml.full_load")


def test_only_messages_between_the_processes_of_a_run_are_pickles() -> None:
    found = {path.relative_to(ROOT).as_posix() for name in ("load", "loads") for path, _ in calls(f"pickle.{name}")}
    assert {path.removeprefix("src/wellfed/") for path in found if path.startswith("src/")} <= PICKLES


@pytest.mark.parametrize("path", ["Makefile", "{{cookiecutter.project_slug}}/Makefile"])
def test_make_asks_for_wheels_but_for_one_package(path: str) -> None:
    text = (ROOT / path).read_text(encoding="utf-8")
    assert re.search(r"^WHEELS = --only-binary :all:$", text, flags=re.MULTILINE)
    assert re.search(r"^PIP = .*\$\(WHEELS\)", text, flags=re.MULTILINE)
    (line,) = re.findall(r"^\t(.*--only-binary :none:.*)$", text, flags=re.MULTILINE)
    assert "antlr4-python3-runtime" in line


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_pins_its_actions_reads_only_and_pastes_nothing_into_a_shell(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    workflow: dict[str, Any] = yaml.safe_load(text)
    assert workflow["permissions"] == {"contents": "read"}
    for action in re.findall(r"^\s*(?:- )?uses: (.*)$", text, flags=re.MULTILINE):
        assert action.startswith("./") or re.fullmatch(r"[\w-]+/[\w/.-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action), action
    for job in workflow["jobs"].values():
        for step in job.get("steps", ()):
            assert "${{" not in step.get("run", ""), step
            if "actions/checkout" in step.get("uses", ""):
                assert step["with"]["persist-credentials"] is False


def test_the_notes_of_a_release_are_its_section() -> None:
    spec = importlib.util.spec_from_file_location("release_notes", ROOT / ".github" / "release_notes.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    changelog = "# Changelog\n\n## [Unreleased]\n\n- later\n\n## [1.2.0] - 2027-01-31\n\n- a thing\n\n## [1.1.0]\n"
    assert module.notes("v1.2.0", changelog, "1.2.0") == "- a thing\n"
    for tag, version in (("v1.2.1", "1.2.0"), ("v1.1.0", "1.1.0")):
        with pytest.raises(ValueError, match=re.escape(version)):
            module.notes(tag, changelog, version)
