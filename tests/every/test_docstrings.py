"""The check of docstrings, which `make check` runs."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

TEXT = '''"""Reads a table."""

LIMIT = 3
"""{constant}"""


def read():
    """{function}

    Of the rest nothing is checked.
    """
    return "Of no docstring"
'''


def checked(folder: Path, **texts: str) -> tuple[int, str]:
    (folder / "read.py").write_text(TEXT.format(**texts))
    command = [sys.executable, "tools/docstrings.py", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.stderr == ""
    return done.returncode, done.stdout


def test_a_docstring_that_refers_to_what_is_not_there_is_named_with_its_line(tmp_path: Path):
    code, out = checked(tmp_path, constant="Of the table.", function="Whose rows are read, those of the table.")
    assert code == 1
    assert [line.split(": opens with ")[0] for line in out.splitlines()] == [
        f"{tmp_path / 'read.py'}:4",
        f"{tmp_path / 'read.py'}:8",
    ]


def test_a_verb_or_a_noun_passes(tmp_path: Path):
    texts = {"constant": "Most rows of a table.", "function": "Returns the rows. Those of a page come first."}
    assert checked(tmp_path, **texts) == (0, "docstrings: no fault\n")
