"""Opens a page in Chromium as wide as a phone or a desk, and tells what does not fit, overlaps, or complains."""

import base64
import hashlib
import html
import json
import re
import subprocess
from pathlib import Path
from typing import Any

MEASURE = """
addEventListener("load", async () => {
  const asleep = () => [...document.querySelectorAll(".plot.alive")].some(one => !one.matches(".on"));
  for (let times = 0; times < 2000 && asleep(); times++) await new Promise(done => setTimeout(done, 100));
  const box = one => one.getBoundingClientRect(), said = one => one.outerHTML.slice(0, 90);
  const found = {width: innerWidth, scrolls: document.documentElement.scrollWidth, wide: [], cut: [], overlaps: [],
                 dark: matchMedia("(prefers-color-scheme: dark)").matches,
                 paper: getComputedStyle(document.body).backgroundColor, pictures: []};
  for (const one of document.querySelectorAll("body *"))
    if (!one.closest(".scroll, svg, .live") && box(one).right > innerWidth + 0.5) found.wide.push(said(one));
  for (const one of document.querySelectorAll("body *"))
    if (!one.closest("svg, .live") && one.clientWidth && one.scrollWidth > one.clientWidth + 1
        && getComputedStyle(one).overflowX == "hidden") found.cut.push(said(one));
  for (const picture of document.querySelectorAll(".plot")) {
    const edge = box(picture), labels = [...picture.querySelectorAll("span")].filter(one => one.offsetParent);
    const texts = labels.map(one => [box(one), one.textContent]);
    found.pictures.push([edge.width, edge.height]);
    texts.forEach(([a, text], place) => {
      if (a.left < 0 || a.right > innerWidth)
        found.cut.push(text);
      for (const [b, other] of texts.slice(0, place))
        if (Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
            && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 2) found.overlaps.push(text + " on " + other);
    });
  }
  parent.postMessage(JSON.stringify(found), "*");
});
"""
FRAME = """<!doctype html><body><script>
addEventListener("message", event => { document.getElementById("found").textContent = event.data });
</script><pre id="found"></pre><iframe src="measured.html" style="border:0;width:WIDTHpx;height:900px"></iframe></body>
"""


def with_script(page: str, code: str) -> str:
    """The page with a script that its policy allows."""
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    return page.replace("script-src ", f"script-src 'sha256-{digest}' ", 1) + f"<script>{code}</script>"


def opened(chromium: Path, page: Path, scratch: Path, *, width: int, is_dark: bool = False) -> dict[str, Any]:
    """Returns what a copy of the page measures of itself: parts wider than the screen, text that is cut or lies on
    other text, sizes of pictures, and lines of the console. Only the copy has a script. A window can't be as narrow as
    a phone, a frame can."""
    scratch.mkdir(exist_ok=True)
    (scratch / "measured.html").write_text(with_script(page.read_text(encoding="utf-8"), MEASURE), encoding="utf-8")
    (scratch / "frame.html").write_text(FRAME.replace("WIDTH", str(width)), encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={scratch / 'profile'}"]
    flags += ["--enable-logging=stderr", "--v=0", "--virtual-time-budget=300000", f"--window-size={width + 100},1000"]
    flags += [f"--blink-settings=preferredColorScheme={0 if is_dark else 1}", "--dump-dom"]
    done = subprocess.run(
        [chromium, *flags, (scratch / "frame.html").as_uri()],
        capture_output=True, text=True, encoding="utf-8", errors="replace", timeout=60, check=True,
    )  # fmt: skip
    told = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert told is not None, done.stdout[:500]
    assert told[1], done.stderr[-2000:]
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return {**json.loads(html.unescape(told[1])), "console": console}
