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

LINK = re.compile(r"\]\((\.\./[^)#\s]+)")
"""Start of a link to a parent folder, which may be outside of docs/."""


def main() -> int:
    """Copies the pages with their links changed, runs Zensical, and returns 1 if anything is missing."""
    address = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["repo_url"]
    pages = ROOT / "build" / "docs"
    shutil.rmtree(pages, ignore_errors=True)
    shutil.copytree(ROOT / "docs", pages)
    missing = []
    for page in sorted(pages.rglob("*.md")):
        source = ROOT / "docs" / page.relative_to(pages)
        text = page.read_text(encoding="utf-8")
        for link in sorted(set(LINK.findall(text))):
            target = (source.parent / link).resolve()
            if not target.exists() or not target.is_relative_to(ROOT):
                missing.append(f"{source.relative_to(ROOT)}: {link}")
            elif not target.is_relative_to(ROOT / "docs"):
                name = target.relative_to(ROOT).as_posix()
                text = re.sub(rf"\]\({re.escape(link)}(?=[)#\s])", f"]({address}/blob/main/{name}", text)
        page.write_text(FILE.sub(r'```\1 title="\2"', text), encoding="utf-8")
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
