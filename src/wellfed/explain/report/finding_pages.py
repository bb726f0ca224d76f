"""Finds the documentation of a finding, for links on the page of a run and in ``report.md``."""

from __future__ import annotations

import os
import re
import sysconfig
from pathlib import Path
from urllib.parse import quote

from wellfed import project


def page_of_finding(name: str, folder: Path) -> str | None:
    """Returns the address of a finding's documentation, from a page in ``folder``.

    It is in the engine's checkout, or in the environment that the wheel was installed into, as data of it. None: in
    neither of them.
    """
    pages = project.ENGINE.parents[1] / "docs" / "findings"
    if project.is_engine_installed():
        pages = Path(sysconfig.get_path("data"), "share", "wellfed", "findings")
    page = pages / f"{name}.md"
    if not re.fullmatch(r"\w+", name) or not page.is_file():
        return None
    return quote(Path(os.path.relpath(page, folder.resolve())).as_posix())
