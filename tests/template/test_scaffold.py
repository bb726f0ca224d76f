"""tools/scaffold.py as functions: what goes into a project, under which name, with which edits."""

import re
import tomllib
from os.path import normpath
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.template.commands import load

scaffold = load("tools/scaffold.py")
ANSWERS = {
    "project_name": "My Nets",
    "project_slug": "my-nets",
    "package_name": "my_nets",
    "description": "d",
    "author": "me",
    "license": "MIT",
    "gpu": "auto",
    "workload": "blank",
    "wandb_mode": "auto",
    "wandb_entity": "",
}
EXTRAS = {
    **{"blank": "", "forecast": "tables", "hyperspectral": "mat", "recsys": "hf"},
    **{"restoration": "images", "speech": "audio"},
}


@pytest.fixture(scope="module")
def source(template: Path) -> dict[str, Any]:
    return dict(scaffold.read(template))


@pytest.fixture
def no_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's wheel is built by other tests."""
    monkeypatch.setattr(scaffold, "build_wheel", lambda source: ("wellfed-0.1.0-py3-none-any.whl", b"wheel"))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("from workloads.recsys.text import words", "from nets.text import words"),
        ("python -m workloads.recsys.download", "python -m nets.download"),
        ("workload=recsys gpu=8gb", "workload=nets gpu=8gb"),
        ("recsys_8gb and my-recsys and recsystem", "recsys_8gb and my-recsys and recsystem"),
        ("`recsys_8gb`, `recsys`", "`nets_8gb`, `nets`"),
        ("0.25 ms a batch (`benchmarks/loader.py`).", "0.25 ms a batch."),
        ("one\n\n**Learning.** measured\n\n| a |\n", "one\n"),
    ],
)
def test_renaming(old: str, new: str):
    assert scaffold.renamed(old + "\n", "recsys", "nets").rstrip("\n") == new.rstrip("\n")


@pytest.mark.usefixtures("no_build")
@pytest.mark.parametrize("workload", EXTRAS)
def test_a_project_has_all_that_its_workload_names(workload: str, source: dict[str, Any]):
    """Nothing of the template's tests, no broken link, and the engine's extras."""
    files = scaffold.project_files(source, ANSWERS | {"workload": workload})
    texts = [files[path].content.decode() for path in files if re.match(r"(src|tests)/my_nets/.*\.py", path)]
    imported = {name for text in texts for name in re.findall(r"(?m)^ *(?:from|import) ([\w.]+)", text)}
    assert "my_nets.model" in imported
    assert {name for name in imported if re.match(r"(tests|workloads|benchmarks)\b(?!\.my_nets\b)", name)} == set()
    for path in (path for path in files if path.endswith("README.md")):
        links = re.findall(r"\]\(([^)#]+)", files[path].content.decode())
        assert {normpath(f"{path}/../{link}") for link in links if not link.startswith("https://")} <= files.keys()
    (engine,) = tomllib.loads(files["pyproject.toml"].content.decode())["project"]["dependencies"]
    assert EXTRAS[workload] in engine


@pytest.mark.usefixtures("no_build")
@pytest.mark.parametrize(
    "given", [{"license": "GPL"}, {"workload": "chess"}, {"project_slug": "Click"}, {"package_name": "torch"}]
)
def test_choices_and_names_that_can_not_be_are_refused(given: dict[str, str], source: dict[str, Any]):
    ((key, value),) = given.items()
    with pytest.raises(scaffold.ScaffoldError, match=f"{key}='?{value}"):
        scaffold.project_files(source, ANSWERS | given)


@pytest.mark.usefixtures("no_build")
def test_an_answer_may_look_like_the_file_that_it_goes_into(source: dict[str, Any]):
    text = r"""license = "MIT" {{ cookiecutter.author }} \1 '''"""
    files = scaffold.project_files(source, ANSWERS | {"description": text, "wandb_entity": "us"})
    assert tomllib.loads(files["pyproject.toml"].content.decode())["project"]["description"] == text
    assert yaml.safe_load(files["configs/logger/wandb.yaml"].content)["entity"] == "us"


@pytest.mark.slow
def test_the_same_files_give_the_same_wheel_without_a_network(source: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("UV_OFFLINE", "1")
    name, first = scaffold.build_wheel(source)
    assert scaffold.build_wheel(source) == (name, first)
    assert re.fullmatch(r"wellfed-[\d.]+-py3-none-any\.whl", name)
