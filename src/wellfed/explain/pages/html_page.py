"""Fills in the templates of pages, HTML and Markdown, in which every value is shown as text whatever it holds."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shlex
import sys
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

import jinja2
from jinja2 import Environment, FileSystemBytecodeCache, FileSystemLoader, StrictUndefined
from jinja2.bccache import Bucket

from wellfed.explain.pages.chart import Colour
from wellfed.masking import hidden
from wellfed.units import counted, show_gib, show_percent, show_text

_LIVE = ("uplot/uPlot.js", "charts.js", "charts.css")
"""Library, script and style of live charts."""
_STYLE = "document.head.append(Object.assign(document.createElement('style'), {textContent: %s}));"
_STYLES, _SPACE = re.compile("<style>.*?</style>", re.DOTALL), re.compile(r"\s*([{};,])\s*|(?<=:)\s+")
"""Styles of a page, and the space in them that a browser does not need."""
_COMMENT = re.compile(r"^\s*//.*\n|^\s+", re.MULTILINE)
"""Comments and indents of our script, which a page leaves out."""
_FOLDER = Path(__file__).parent
_SCRIPT_HERE = "<!--script-->"
"""Comment of ``base.html.j2`` that the script takes the place of."""
_FIGURES = re.compile(r'<script type="application/json">(.*?)</script>', re.DOTALL)
"""Figures of one chart. A page holds those of all its charts packed, with the script."""
_LOADER = """
(async () => {
  const unpacked = id => {
    const packed = Uint8Array.from(atob(document.getElementById(id).textContent), sign => sign.charCodeAt(0));
    return new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"))).text();
  };
  const script = document.createElement("script");
  [window.figures, script.textContent] = await Promise.all(["figures", "charts"].map(unpacked));
  document.body.append(script);
})();
"""


class _CompiledTemplates(FileSystemBytecodeCache):
    """Compiled templates beside the compiled modules: compiling those of a run's page takes as long as drawing it."""

    def load_bytecode(self, bucket: Bucket) -> None:
        """Reads a compiled template. One that is damaged is compiled again."""
        try:
            super().load_bytecode(bucket)
        except Exception:  # noqa: BLE001  pickle and marshal raise anything on damaged bytes
            bucket.reset()

    def dump_bytecode(self, bucket: Bucket) -> None:
        """Keeps a compiled template, unless Python must not write or the folder can't be written."""
        if not sys.dont_write_bytecode:
            with suppress(OSError):
                super().dump_bytecode(bucket)


_COMPILED = _CompiledTemplates(
    str(_FOLDER / "__pycache__"), f"%s.{sys.implementation.cache_tag}.{jinja2.__version__}.jinja"
)


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
    pages.globals["colour_names"] = get_args(Colour)
    html = pages.get_template(template.name).render(policy=policy, **values)
    if not autoescape:
        return html
    # Texts of users are escaped, and hold neither such a comment nor a script.
    html = _STYLES.sub(lambda found: _SPACE.sub(r"\1", found[0]), hidden(html))
    figures = _FIGURES.findall(html)
    packed = _packed(f"[{','.join(figures)}]")
    scripts = f'<script type="text/plain" id="figures">{packed}</script>\n{loader}' if figures else ""
    return _FIGURES.sub("", html).replace(_SCRIPT_HERE, scripts, 1)


def _packed(text: str) -> str:
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


@cache
def script() -> tuple[str, str]:
    """Returns the script of charts, which unpacks itself in the browser, and the page's policy for it."""
    library, own, style = (_FOLDER.joinpath(name).read_text(encoding="utf-8") for name in _LIVE)
    code = f"{library}{_COMMENT.sub('', own)}{_STYLE % json.dumps(style.partition(chr(10))[2])}"
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in (_LOADER, code)
    )
    terms = (_FOLDER / "uplot" / "LICENSE").read_text(encoding="utf-8").strip()
    html = (
        f"<!-- The charts are drawn by uPlot, https://github.com/leeoniya/uPlot\n{terms} -->\n"
        f'<script type="text/plain" id="charts">{_packed(code)}</script>\n<script>{_LOADER}</script>'
    )
    sources = "default-src 'none'; base-uri 'none'; form-action 'none'; style-src 'unsafe-inline'; img-src data:"
    return html, f"{sources}; script-src {hashes}"


def _shown(value: Any) -> Any:
    """Returns plain text without control characters; HTML stays unchanged."""
    return show_text(value) if type(value) is str else value
