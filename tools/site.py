"""Builds the documentation's site into build/site. Fails if a page, an anchor or a linked file is missing.

    python tools/site.py

Links to files of the repository outside of docs/ are relative paths in the pages. On the site they lead to the
repository. The path of a file, beside the language of its code block, becomes the title of the block.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
FILE = re.compile(r"^```(\w+) (\S+)$", flags=re.MULTILINE)
"""Head of a code block that is a whole file."""

OUTSIDE = re.compile(r"\]\(\.\./([^)#\s]+)")
"""Start of a link to a file outside of docs/."""


def main() -> int:
    """Copies the pages with their links changed, runs Zensical, and returns 1 if anything is missing."""
    address = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["repo_url"]
    pages = ROOT / "build" / "docs"
    shutil.rmtree(pages, ignore_errors=True)
    shutil.copytree(ROOT / "docs", pages)
    missing = []
    for page in sorted(pages.rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        missing += [f"docs/{page.name}: {name}" for name in OUTSIDE.findall(text) if not (ROOT / name).exists()]
        text = FILE.sub(r'```\1 title="\2"', OUTSIDE.sub(rf"]({address}/blob/main/\1", text))
        page.write_text(text, encoding="utf-8")
    print("\n".join(f"no such file: {name}" for name in missing), end="\n" if missing else "")
    built = subprocess.run(
        [Path(sys.executable).with_name("zensical"), "build", "--clean", "--strict"],
        cwd=ROOT,
        env={**os.environ, "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    output = re.sub(r"\x1b\[[0-9;]*m", "", built.stdout + built.stderr)
    print(output.partition("Traceback")[0].strip())
    return int(bool(missing or built.returncode))


if __name__ == "__main__":
    sys.exit(main())
