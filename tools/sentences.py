"""Checks the length of sentences in Markdown pages: none has over 30 words.

    python tools/sentences.py README.md docs --show

The mean of a page is at most 16 words. Code, tables, headings, HTML and the addresses of links are left out.
`inline code` counts as one word.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

LONGEST = 30
"""Words of one sentence."""

LONGEST_MEAN = 16.0
"""Words of a sentence in the mean of a page."""

FENCE = re.compile(r"^\s*(```|~~~)")
ITEM = re.compile(r"^\s*(?:[-*+]|\d+\.)\s+")
LEFT_OUT = re.compile(r"^\s*(?:\||#|<|\[[^\]]+\]:)")
ADMONITION = re.compile(r'^(?:!!!|\?\?\?\+?|===)\s+\S+(?:\s+".*")?$')
END = re.compile(r"(?<=[.!?])[)\"*]*\s+(?=[\"(*\[`]*[A-Z0-9`])")


class Sentence(NamedTuple):
    """One sentence of a page, with the line on which its paragraph begins."""

    line: int
    text: str

    @property
    def words(self) -> int:
        """Number of words; what stands between spaces and holds a letter or a digit is one."""
        return sum(1 for word in self.text.split() if re.search(r"\w", word))


def paragraphs(page: str) -> Iterator[Sentence]:
    """Yields the paragraphs and list items of a page, each with its first line."""
    start, lines, fenced = 0, [], False
    for number, line in enumerate([*page.splitlines(), ""], 1):
        if FENCE.match(line):
            fenced = not fenced
        skipped = fenced or not line.strip() or FENCE.match(line) or LEFT_OUT.match(line) or ADMONITION.match(line)
        if lines and (skipped or ITEM.match(line)):
            yield Sentence(start, " ".join(lines))
            lines = []
        if not skipped:
            start = start if lines else number
            lines.append(ITEM.sub("", line).strip().removeprefix("> "))


def sentences(page: str) -> list[Sentence]:
    """Returns the sentences of a page."""
    found = []
    for line, paragraph in paragraphs(page):
        text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", paragraph)
        text = re.sub(r"`[^`]*`", "`x`", text)
        text = re.sub(r"\b(?:e\.g|i\.e|etc|vs)\.", "eg", text)
        found += [Sentence(line, part) for part in END.split(text) if re.search(r"\w", part)]
    return found


def faults(path: Path) -> Iterator[str]:
    """Yields a line for each sentence that is too long, and one if the mean of the page is."""
    found = sentences(path.read_text(encoding="utf-8"))
    for sentence in found:
        if sentence.words > LONGEST:
            yield f"{path}:{sentence.line}: {sentence.words} words, at most {LONGEST}: {sentence.text[:100]} ..."
    mean = fmean(sentence.words for sentence in found) if found else 0.0
    if mean > LONGEST_MEAN:
        yield f"{path}: {mean:.1f} words a sentence in the mean, at most {LONGEST_MEAN:g}"


def pages(names: list[str]) -> list[Path]:
    """Returns the Markdown files among the names and below the folders."""
    return [path for name in map(Path, names) for path in (sorted(name.rglob("*.md")) if name.is_dir() else [name])]


def main(arguments: list[str]) -> int:
    """Prints the faults and returns 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pages", nargs="+", help="Markdown files, or folders of them")
    parser.add_argument("--show", action="store_true", help="print the mean of each page too")
    options = parser.parse_args(arguments)
    if options.show:
        for path in pages(options.pages):
            found = [sentence.words for sentence in sentences(path.read_text(encoding="utf-8"))]
            over = sum(words > LONGEST for words in found)
            print(f"{fmean(found or [0]):5.1f} {max(found, default=0):4} {over:4} {len(found):5}  {path}")
    found = [fault for path in pages(options.pages) for fault in faults(path)]
    print("\n".join(found) or "sentences: no fault")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
