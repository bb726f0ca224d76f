"""Makes the library of the pages' charts, uPlot, anew: only what `charts.js` uses, which is three quarters of it.

    python tools/uplot.py      # needs npm, and the registry

Axes of dates, legends, other scales and other kinds of lines are cut out of the published module by `EDITS`; esbuild
and terser leave out what is then unused. src/wellfed/explain/pages/uplot/README.md has the digests.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "src" / "wellfed" / "explain" / "pages" / "uplot"
VERSION = "1.6.32"
PACKED = "4b8a8191e425658e3ea8c8c1314b0fc679c861ee3a1af2b20c7b16ba50b5133d"
"""SHA-256 of the package."""
TOOLS = ("esbuild@0.28.2", "terser@5.51.4")
BANNER = f"/*! https://github.com/leeoniya/uPlot (v{VERSION}), parts of it: see README.md beside the source */\n"
EDITS: dict[str, tuple[str, int]] = {
    r"const localTz = .*?;\n": ("", 1),
    r"const \[ timeIncrs\w+, .*?;\n": ("", 2),
    r"\tconst _tzDate  = .*?const _timeSeriesVal .*?;\n": ("", 1),
    r"const mode = self\.mode;": ("const mode = 1;", 1),
    r"const showLegend = legend\.show;": ("const showLegend = false;", 1),
    r"\b(?:[\w.]*[dD]istr) ==\s+(?:4|2|100)\b": ("false", 24),
    r"^\t?uPlot\.(?:assign|fmtNum|rangeNum|rangeLog|rangeAsinh|orient|pxRatio|sync|addGap|clipGaps)\s*= .*?;\n": (
        "",
        10,
    ),
    r"^\tuPlot\.(?:fmtDate|tzDate)\s*= .*?;\n": ("", 2),
    r"^\t\(paths\.(?:stepped|bars|spline)\s*= .*?;\n": ("", 3),
    r"^export function ": ("function ", 1),
    r"^export \{ uPlot as default \};": ("window.uPlot = uPlot;", 1),
}
"""Pattern -> replacement, and how often it is found. Without dates there is no time in a scale."""
MINIFY = ["passes=4,keep_fargs=false,pure_getters=true,unsafe=true,unsafe_math=true,inline=3,toplevel=true"]


def main() -> int:
    """Writes the library and prints its digest."""
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        run("npm", "pack", "--silent", f"uplot@{VERSION}", cwd=place)
        package = place / f"uplot-{VERSION}.tgz"
        if (digest := hashlib.sha256(package.read_bytes()).hexdigest()) != PACKED:
            print(f"{package.name} has another digest: {digest}", file=sys.stderr)
            return 1
        with tarfile.open(package) as archive:
            archive.extractall(place, filter="data")
        source = (place / "package" / "dist" / "uPlot.esm.js").read_text(encoding="utf-8")
        (place / "cut.js").write_text(cut(source), encoding="utf-8")
        run("npm", "install", "--silent", "--no-audit", "--no-fund", *TOOLS, cwd=place)
        programs = place / "node_modules" / ".bin"
        bundle = ["--bundle", "--minify-syntax", "--format=iife", "--target=es2022", "--log-level=error"]
        run(programs / "esbuild", "cut.js", *bundle, "--outfile=used.js", cwd=place)
        run(programs / "terser", "used.js", "-c", *MINIFY, "-m", "toplevel", "-o", "small.js", cwd=place)
        found = BANNER + (place / "small.js").read_text(encoding="utf-8")
    (FOLDER / "uPlot.js").write_text(found, encoding="utf-8")
    print(f"uPlot.js: {len(found):,} bytes, SHA-256 {hashlib.sha256(found.encode()).hexdigest()}")
    return 0


def cut(source: str) -> str:
    """Returns the module without what the pages do not use."""
    source, number = re.subn(r"let isTime = .*?;", "", source)
    assert number == 3
    source = re.sub(r"\bisTime\b", "false", source)
    for pattern, (new, number) in EDITS.items():
        source, times = re.subn(pattern, new, source, flags=re.MULTILINE | re.DOTALL)
        assert times == number, (pattern, times)
    return source


def run(*words: str | Path, cwd: Path) -> None:
    """Runs a program in a folder; its failure ends this one."""
    subprocess.run(words, cwd=cwd, check=True)


if __name__ == "__main__":
    sys.exit(main())
