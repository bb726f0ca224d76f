"""Builds the documentation's site into build/site. Fails if a page, an anchor or a linked file is missing.

    python tools/site.py

Links to files of the repository outside of docs/ are relative paths in the pages. On the site they lead to the
repository, or are plain text if it has no address. The path of a file, beside the language of its code block, becomes
the title of the block.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
FILE = re.compile(r"^```(\w+) (\S+)$", flags=re.MULTILINE)
"""Head of a code block that is a whole file."""

LINK = re.compile(r"\[([^\]]*)\]\((\.\./[^)#\s]+)([^)]*)\)")
"""Link to a parent folder, which may be outside of docs/."""

CONFIG = ROOT / "build" / "mkdocs.yml"
"""mkdocs.yml with the address of the repository."""


def repository(environ: Mapping[str, str] = os.environ, root: Path = ROOT) -> str | None:
    """Returns the address of this repository on the web; None if it has none."""
    if "GITHUB_REPOSITORY" in environ:
        return f"{environ.get('GITHUB_SERVER_URL', 'https://github.com')}/{environ['GITHUB_REPOSITORY']}"
    asked = ["git", "-C", str(root), "remote", "get-url", "origin"]
    try:
        origin = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:  # no git
        return None
    found = re.fullmatch(r"(?:https://|ssh://)?(?:[^@/]*@)?([\w.-]+\.\w+)[:/]([\w./-]+?)(?:\.git)?/?", origin)
    return None if found is None else f"https://{found[1]}/{found[2]}"


def main() -> int:
    """Copies the pages with their links changed, runs Zensical, and returns 1 if anything is missing."""
    address = repository()
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    pages = ROOT / "build" / "docs"
    shutil.rmtree(pages, ignore_errors=True)
    shutil.copytree(ROOT / "docs", pages)
    missing = []
    for page in sorted(pages.rglob("*.md")):
        source = ROOT / "docs" / page.relative_to(pages)
        text = page.read_text(encoding="utf-8")
        for whole, words, link, rest in sorted({found.group(0, 1, 2, 3) for found in LINK.finditer(text)}):
            target = (source.parent / link).resolve()
            if not target.exists() or not target.is_relative_to(ROOT):
                missing.append(f"{source.relative_to(ROOT)}: {link}")
            elif not target.is_relative_to(ROOT / "docs"):
                name = target.relative_to(ROOT).as_posix()
                text = text.replace(whole, f"[{words}]({address}/blob/main/{name}{rest})" if address else words)
        page.write_text(FILE.sub(r'```\1 title="\2"', text), encoding="utf-8")
    places = {name: Path(config[name]).relative_to("build").as_posix() for name in ("docs_dir", "site_dir")}
    config |= {**places, **({"repo_url": address} if address else {})}
    CONFIG.write_text(yaml.safe_dump(config, allow_unicode=True, sort_keys=False), encoding="utf-8")
    print("\n".join(f"no such file: {name}" for name in missing), end="\n" if missing else "")
    built = subprocess.run(
        [Path(sys.executable).with_name("zensical"), "build", "--clean", "--strict", "--config-file", CONFIG],
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
