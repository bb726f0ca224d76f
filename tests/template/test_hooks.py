"""cookiecutter's hooks: names that are refused, and where the template is found."""

from pathlib import Path

import pytest

from tests.template.commands import git, load
from tests.template.test_scaffold import ANSWERS

pre = load("hooks/pre_gen_project.py")
post = load("hooks/post_gen_project.py")


def test_answers_that_work_have_no_fault():
    assert pre.faults(ANSWERS) == []
    assert pre.faults(ANSWERS | {"project_slug": "A.b-c_1", "package_name": "n" * 30, "wandb_entity": "a.b-c"}) == []
    assert pre.faults(ANSWERS | {"description": "", "author": r'Zoë "Z" O\'Neil'}) == []


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"package_name": "3d_nets"}, "package_name='3d_nets'"),
        ({"package_name": "json"}, "package_name='json'"),
        ({"package_name": "n" * 31}, "Take package_name=my_nets"),
        ({"project_slug": "-x"}, "project_slug='-x'"),
        ({"project_slug": "src"}, "Take project_slug=my-nets"),
        ({"description": "two\nlines"}, "Write it in one line"),
    ],
)
def test_names_that_can_not_work_are_refused(given: dict[str, str], told: str):
    (fault,) = pre.faults(ANSWERS | given)
    assert told in fault


def test_the_template_is_found_from_its_path_or_cloned(
    own_template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PWD", str(own_template.parent))
    assert next(post.candidates({"_repo_dir": str(own_template)})) == own_template
    assert next(post.candidates({"_repo_dir": own_template.name})) == own_template
    commit = git(own_template, "rev-parse", "HEAD").strip()
    post.clone({"_template": str(own_template), "_commit": commit}, tmp_path / "clone")
    assert (tmp_path / "clone/tools/scaffold.py").is_file()
