"""Fills in the templates of pages, in which every value is shown as text whatever it holds."""

from __future__ import annotations

import base64
import hashlib
import shlex
import sys
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jinja2 import Environment, FileSystemBytecodeCache, FileSystemLoader, StrictUndefined
from jinja2.bccache import Bucket

from wellfed.masking import hidden
from wellfed.units import counted, show_gib, show_percent, show_text

_FOLDER = Path(__file__).parent
_SCRIPT_HERE = "<!--script-->"
"""Comment of ``base.html.j2`` that the script takes the place of."""
_LOADER = """
(async () => {
  const packed = Uint8Array.from(atob(document.getElementById("packed").textContent), sign => sign.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const script = document.createElement("script");
  script.textContent = await new Response(stream).text();
  document.body.append(script);
})();
"""


class _CompiledTemplates(FileSystemBytecodeCache):
    """Compiled templates beside the compiled modules: compiling those of a run's page takes as long as drawing it."""

    def dump_bytecode(self, bucket: Bucket) -> None:
        """Keeps a compiled template, unless Python must not write or the folder can't be written."""
        if not sys.dont_write_bytecode:
            with suppress(OSError):
                super().dump_bytecode(bucket)


_COMPILED = _CompiledTemplates(str(_FOLDER / "__pycache__"), f"%s.{sys.implementation.cache_tag}.jinja")


def fill_in(
    template: Path,
    values: Mapping[str, Any],
    *,
    autoescape: bool = True,
    filters: Mapping[str, Callable[[str], str]] = MappingProxyType({}),
) -> str:
    """Returns the page; a template may extend ``base.html.j2``.

    Args:
        autoescape: for HTML; Markdown brings filters of its own.
        filters: beside shell, counted, percent, gib.
    """
    pages = Environment(
        loader=FileSystemLoader([template.parent, Path(__file__).parent]),
        autoescape=autoescape,
        undefined=StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
        bytecode_cache=_COMPILED,
    )
    pages.filters.update(shell=shlex.join, counted=counted, percent=show_percent, gib=show_gib, **filters)
    loader, policy = script()
    html = pages.get_template(template.name).render(policy=policy, **values)
    if not autoescape:
        return html
    # Texts of users are escaped, and hold no such comment.
    return hidden(html).replace(_SCRIPT_HERE, loader if 'type="application/json"' in html else "", 1)


@cache
def script() -> tuple[str, str]:
    """Returns the script of charts, which unpacks itself in the browser, and the page's policy for it."""
    library = (_FOLDER / "uplot" / "uPlot.iife.min.js").read_text(encoding="utf-8")
    code = library + (_FOLDER / "charts.js").read_text(encoding="utf-8")
    packed = base64.b64encode(zlib.compress(code.encode(), 9)).decode()
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in (_LOADER, code)
    )
    terms = (_FOLDER / "uplot" / "LICENSE").read_text(encoding="utf-8").strip()
    html = (
        f"<!-- The charts are drawn by uPlot, https://github.com/leeoniya/uPlot\n{terms} -->\n"
        f'<script type="text/plain" id="packed">{packed}</script>\n<script>{_LOADER}</script>'
    )
    sources = "default-src 'none'; base-uri 'none'; form-action 'none'; style-src 'unsafe-inline'; img-src data:"
    return html, f"{sources}; script-src {hashes}"


def _shown(value: Any) -> Any:
    """Returns plain text without control characters; HTML stays unchanged."""
    return show_text(value) if type(value) is str else value
