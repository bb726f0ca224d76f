"""Finds the documentation of a finding, for links on the page of a run and in ``report.md``."""

from __future__ import annotations

import os
import re
import sysconfig
from functools import cache
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path
from urllib.parse import quote

from wellfed import project


def page_of_finding(name: str, folder: Path) -> str | None:
    """Returns the address of a finding's documentation, from a page in ``folder``.

    It is on the site that the package's metadata names, else in the engine's checkout, else in the environment that
    the wheel was installed into. None: in none of them.
    """
    if not re.fullmatch(r"\w+", name):
        return None
    if (site := _documentation()) is not None:
        return f"{site.rstrip('/')}/findings/{name}/"
    page = _pages() / f"{name}.md"
    if not page.is_file():
        return None
    try:
        return quote(Path(os.path.relpath(page, folder.resolve())).as_posix())
    except ValueError:  # on another drive of Windows
        return page.as_uri()


def _pages() -> Path:
    """Returns the folder of the findings' pages, which the wheel brings as data of the environment."""
    if project.is_engine_installed():
        return Path(sysconfig.get_path("data"), "share", "wellfed", "findings")
    return project.ENGINE.parents[1] / "docs" / "findings"


@cache
def _documentation() -> str | None:
    """Returns ``Documentation`` of the project's URLs in pyproject.toml, as installed; None without one."""
    try:
        urls = metadata("wellfed").get_all("Project-URL") or []
    except PackageNotFoundError:
        return None
    named = dict(url.split(", ", 1) for url in urls if ", " in url)
    found = named.get("Documentation", "")
    return found if found.startswith("https://") else None
