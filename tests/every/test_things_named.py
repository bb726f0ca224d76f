"""Pages, help and messages name no knob, option, flag, file or module that does not exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.every.test_docs import PAGES, page
from wellfed.config.knobs import FREE_NODES, entries
from wellfed.config.schema import EvaluateConfig, RunConfig, TuneRunConfig

ROOT = Path(__file__).parents[2]
CODE = sorted((ROOT / "src" / "wellfed").rglob("*.py"))
KNOBS = {name: entry for kind in (RunConfig, TuneRunConfig, EvaluateConfig) for name, entry in entries(kind).items()}
GROUPS = {name.partition(".")[0] for name in KNOBS if "." in name}
OPTIONS = {
    path.name: {each.stem for each in path.glob("*.yaml")} for path in (ROOT / "configs").iterdir() if path.is_dir()
}
NAMED = re.compile(rf"(?<![\w./<-])({'|'.join(sorted(GROUPS))})\.([a-z_]+(?:\.[a-z_]+)*)(?![\w./(<*{{]|\.\.\.)")
"""Something that may be a knob: ``loader.num_workers``, and no part of a path, a call or a module."""
CHOSEN = re.compile(rf"(?<![\w./+-])({'|'.join(sorted(OPTIONS))})=([A-Za-z_][\w]*)(?![\w.,(])")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
FILE = re.compile(r"`((?:docs|src|tests|tools|benchmarks|configs)/[\w./-]+\.\w+)`")
MODULE = re.compile(r"`(wellfed(?:\.[a-z_]+)+)(?:\.[A-Z]\w*)?`")


def spans(text: str) -> str:
    """Code within sentences and tables, and what blocks show to be typed."""
    blocks = re.findall(r"^```(?:bash|text|yaml)?\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    inline = re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
    return "\n".join([*blocks, *inline])


@cache
def messages() -> dict[str, str]:
    """Texts of the engine by its files: messages, help, docstrings."""
    found = {}
    for path in CODE:
        texts = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
        found[path.relative_to(ROOT).as_posix()] = "\n".join(
            text for text in texts if isinstance(text, str) and " " in text
        )
    return found


def texts() -> Iterator[tuple[str, str]]:
    yield from ((name, spans(page(name))) for name in PAGES)
    yield from messages().items()


TEXTS = dict(texts())


def unknown_knobs(text: str) -> list[str]:
    found = []
    for group, rest in NAMED.findall(text):
        name = f"{group}.{rest}"
        if name not in KNOBS and not any(name.startswith(f"{free}.") for free in FREE_NODES) and name not in FOREIGN:
            found.append(name)
    return found


FOREIGN: frozenset[str] = frozenset()
"""Names with a dot that are attributes of libraries."""


@pytest.mark.parametrize("name", TEXTS)
def test_knobs_exist(name: str) -> None:
    assert unknown_knobs(TEXTS[name]) == []


@pytest.mark.parametrize("name", TEXTS)
def test_options_exist(name: str) -> None:
    own = set(re.findall(r"configs/\w+/(\w+)\.yaml", page(name) if name in PAGES else ""))
    found = [
        f"{group}={option}" for group, option in CHOSEN.findall(TEXTS[name]) if option not in {*OPTIONS[group], *own}
    ]
    assert found == []
