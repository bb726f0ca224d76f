"""The check of sentences, which `make check` runs."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHORT = "Word " + "word " * 28 + "end."
LONG = "Word " + "word " * 29 + "end."
MESSAGE = 'def check(value):\n    """{docstring}"""\n    return Finding("id", f"{first} " "{second}" + value, {{}})\n'


def checked(folder: Path, name: str, text: str) -> tuple[int, list[str]]:
    (folder / name).write_text(text)
    command = [sys.executable, "tools/sentences.py", str(folder), "--messages", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.stderr == ""
    return done.returncode, done.stdout.splitlines()


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (SHORT, SHORT, None),
        (LONG, SHORT, 31),
        ("A word.", LONG, 31),
        ("Word: " + "word " * 14 + "{value}", "word " * 15 + "end.", 32),  # a value is a word
        ("Ends here.{value} " + SHORT, "", None),  # or a sentence
        ("Word, " + "word " * 19, "word " * 11, 32),  # + value
    ],
)
def test_a_long_sentence_of_a_message_is_named(tmp_path: Path, first: str, second: str, words: int | None):
    code, lines = checked(tmp_path, "rule.py", MESSAGE.format(docstring=LONG, first=first, second=second))
    if words is None:
        assert (code, lines) == (0, ["sentences: no fault"])
        return
    (line,) = lines
    assert code == 1
    assert line.startswith(f"{tmp_path / 'rule.py'}:3: {words} words, at most 30: ")


def test_code_and_lists_in_a_text_are_left_out(tmp_path: Path):
    lines = "\n    ".join(["word,"] * 40)
    listed = f'CODE = """\n    {lines}\n"""\nNAMES = "{"word " * 40}"\n'
    assert checked(tmp_path, "lists.py", listed) == (0, ["sentences: no fault"])


def test_a_page_has_its_mean_too(tmp_path: Path):
    code, lines = checked(tmp_path, "page.md", f"# Title\n\n{SHORT}\n")
    assert (code, lines) == (1, [f"{tmp_path / 'page.md'}: 30.0 words a sentence in the mean, at most 16"])
