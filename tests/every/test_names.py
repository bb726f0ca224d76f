"""Names have one meaning each: no class and no file of the engine is called as another one is."""

import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

ENGINE = Path(__file__).parents[2] / "src" / "wellfed"
FILES = sorted(path for path in ENGINE.rglob("*.py") if path.name != "__init__.py")
STARTING_POINT = ENGINE / "cli" / "blank"
"""Copied into src/ of a project: its names are the user's."""


def twice(found: Iterable[tuple[str, Path]]) -> dict[str, list[str]]:
    places: dict[str, list[str]] = defaultdict(list)
    for name, path in found:
        places[name].append(path.relative_to(ENGINE).as_posix())
    return {name: where for name, where in places.items() if len(where) > 1}


def test_no_class_name_stands_twice():
    classes = [
        (name.lstrip("_"), path)
        for path in FILES
        if STARTING_POINT not in path.parents
        for name in re.findall(r"^class (\w+)", path.read_text(), flags=re.MULTILINE)
    ]
    assert len(classes) > 150
    assert twice(classes) == {}


def test_no_file_name_stands_twice():
    """But for a command, which is called as what it shows."""
    files = [(path.name, path) for path in FILES if path.parent.name != "commands"]
    assert len(files) > 150
    assert twice(files) == {}


def test_every_file_opens_with_a_sentence():
    """The first paragraph of each docstring ends with a full stop or a colon."""
    for path in FILES:
        opening = re.match(r'"""(.+?)"""', path.read_text(), flags=re.DOTALL)
        assert opening, path
        first = " ".join(opening[1].partition("\n\n")[0].split())
        assert first.endswith((".", ":")), f"{path}: {first}"
        assert first[0].isupper() or first.startswith("`"), f"{path}: {first}"
