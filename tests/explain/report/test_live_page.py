"""The page in a real browser: charts zoom together and are read off, with no word of its policy broken."""

import html
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.kit.browser import with_script
from tests.kit.made_run import made_run
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.run_rules import conclude
from wellfed.explain.report.run_page import to_html

USED = """
addEventListener("load", () => setTimeout(async () => {
  const wait = () => new Promise(done => setTimeout(done, 100)), plots = [...document.querySelectorAll(".plot")];
  for (let times = 0; times < 5000 && !plots.every(one => one.matches(".on")); times++) await wait();
  const over = [...document.querySelectorAll(".u-over")], edge = over[0].getBoundingClientRect();
  const mouse = (kind, share, at = over[0]) => at.dispatchEvent(new MouseEvent(kind, {
    bubbles: true, clientX: edge.left + share * edge.width, clientY: edge.top + 20, movementX: 1}));
  const touch = (kind, share) => {
    const where = {clientX: edge.left + share * edge.width, clientY: edge.top + 20};
    const at = new Touch({identifier: 1, target: over[0], ...where});
    over[0].dispatchEvent(new TouchEvent(kind, {changedTouches: [at]}));
  };
  const read = () => plots.map(plot => {
    const one = plot.querySelector(".values:not([hidden])");
    return one ? one.innerText : "";
  });
  const ink = plot => plot.querySelector("canvas").toDataURL();
  const found = {plots: plots.length, origin: String(origin)};
  found.live = plots.filter(one => one.matches(".on")).length;
  const whole = plots.map(ink);
  mouse("mouseenter", .3); mouse("mousemove", .3);
  await wait();
  found.hovered = read();
  mouse("mousedown", .25); mouse("mousemove", .5); mouse("mouseup", .5, document);
  await wait();
  found.zoomed = plots.map(ink).map((now, place) => now != whole[place]);
  mouse("mousemove", 0); await wait(); found.left = read()[0];
  mouse("mousemove", 1); await wait(); found.right = read()[0];
  mouse("dblclick", .5); mouse("mouseleave", .5);
  await wait();
  found.again = plots.map(ink).map((now, place) => now == whole[place]);
  touch("touchstart", .25); touch("touchmove", .5); touch("touchend", .5);
  await wait();
  found.touched = plots.map(ink).map((now, place) => now != whole[place]);
  document.querySelectorAll(".tools button")[2].click();
  await wait();
  parent.postMessage(JSON.stringify(found), "*");
}, 100));
"""
FOLLOWED = """
addEventListener("load", () => setTimeout(async () => {
  const wait = () => new Promise(done => setTimeout(done, 100)), plots = [...document.querySelectorAll(".plot")];
  for (let times = 0; times < 5000 && !plots.every(one => one.matches(".on")); times++) await wait();
  const over = document.querySelector(".u-over"), edge = over.getBoundingClientRect();
  const mouse = (kind, share, at = over) => at.dispatchEvent(new MouseEvent(kind, {
    bubbles: true, clientX: edge.left + share * edge.width, clientY: edge.top + 20, movementX: 1}));
  mouse("mouseenter", 0); mouse("mousemove", 0); await wait();
  const at = parseFloat(document.querySelector(".values:not([hidden])").innerText);
  const open = document.querySelectorAll("details[open]").length, late = [...document.querySelectorAll(".late")];
  const found = {at, down: scrollY, open, late: late.map(one => one.textContent)};
  if (!found.down) {
    mouse("mousedown", .5); mouse("mousemove", .75); mouse("mouseup", .75, document);
    document.querySelector("details").open = true;
    scrollTo(0, 400);
  }
  parent.postMessage(JSON.stringify(found), "*");
}, 100));
"""
FRAME = """<!doctype html><body><script>
addEventListener("message", event => { document.getElementById("found").textContent = event.data });
</script><pre id="found"></pre>
<iframe sandbox="allow-scripts" src="used.html" style="border:0;width:1200px;height:3000px"></iframe></body>
"""


def run(chromium: Path, page: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={page.parent / 'profile'}"]
    options += [
        "--enable-logging=stderr",
        "--v=0",
        "--virtual-time-budget=600000",
        "--disable-features=IsolateSandboxedIframes",
        "--window-size=1300,1000",
        *flags,
    ]
    return subprocess.run(
        [chromium, *options, page.as_uri()],
        capture_output=True, text=True, encoding="utf-8", errors="replace", timeout=90, check=True,
    )  # fmt: skip


def page_of(folder: Path, **made: Any) -> str:
    made_run(folder, **made)
    evidence = Evidence.read(folder)
    conclude(evidence)
    return to_html(evidence, folder)


@pytest.fixture(scope="module")
def used(chromium: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Returns what a page measured of itself in a frame like that of wandb's panel, and its console."""
    folder = tmp_path_factory.mktemp("page")
    page = page_of(folder, steps=1200, gpus=2, period_s=9.5)
    (folder / "used.html").write_text(with_script(page, USED), encoding="utf-8")
    (folder / "frame.html").write_text(FRAME)
    done = run(chromium, folder / "frame.html", "--dump-dom")
    told = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert told is not None
    assert told[1], done.stderr[-3000:]
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return {**json.loads(html.unescape(told[1])), "console": console}


@pytest.mark.slow
def test_all_charts_come_alive_in_a_frame_that_may_do_nothing_else(used: dict[str, Any]) -> None:
    assert used["origin"] == "null"
    assert used["live"] == used["plots"] == 9
    assert used["console"] == []


@pytest.mark.slow
def test_a_cursor_reads_off_all_charts_at_one_time(used: dict[str, Any]) -> None:
    linked = [text for text in used["hovered"] if text]
    assert len(linked) == 8  # all but the histogram
    assert re.search(r"utilisation [\d.]+$", linked[0].replace("\n", " "))
    assert re.search(r"step \d+ .*wait [\d.]+ .*compute 30", used["hovered"][3].replace("\n", " "))
    seconds = {float(text.split(" ")[0]) for text in linked}
    assert max(seconds) - min(seconds) < 3


@pytest.mark.slow
def test_dragging_zooms_into_all_linked_charts_and_a_double_click_out_again(used: dict[str, Any]) -> None:
    linked = [bool(text) for text in used["hovered"]]
    assert used["zoomed"] == used["touched"] == linked
    begin, end = (float(used[side].split(" ")[0]) for side in ("left", "right"))
    assert (begin, end) == (pytest.approx(25, abs=2), pytest.approx(40, abs=2))
    assert all(used["again"])


@pytest.mark.slow
def test_the_page_of_a_running_run_reloads_and_keeps_what_was_opened(chromium: Path, tmp_path: Path) -> None:
    page = page_of(tmp_path, steps=300, status="running", host_name="elsewhere")
    hasty = with_script(page.replace('content="60"', 'content="3"'), FOLLOWED)
    frame = (
        re.sub(r" sandbox=\S+", "", FRAME)
        .replace(".textContent = event.data", ".append(event.data, '\\n')")
        .replace("3000", "900")
    )
    (tmp_path / "used.html").write_text(hasty, encoding="utf-8")
    (tmp_path / "frame.html").write_text(frame)
    done = run(chromium, tmp_path / "frame.html", "--dump-dom", "--virtual-time-budget=20000")
    told = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert told is not None
    first, *later = [json.loads(html.unescape(line)) for line in told[1].splitlines()]
    assert (first["open"], first["down"], first["late"]) == (0, 0, [])
    assert len(later) >= 2
    for found in later:
        assert (found["open"], found["down"], found["late"]) == (1, 400, [])
        assert found["at"] > first["at"] + 5  # zoomed
    assert "CONSOLE" not in done.stderr


@pytest.mark.slow
def test_a_page_that_is_not_renewed_says_so_also_in_a_frame_without_storage(chromium: Path, tmp_path: Path) -> None:
    page = page_of(tmp_path, steps=300, status="running", host_name="elsewhere")
    old = re.sub(r'datetime="[^"]*"', 'datetime="2026-01-01T00:00:00Z"', page)
    (tmp_path / "used.html").write_text(with_script(old, FOLLOWED), encoding="utf-8")
    (tmp_path / "frame.html").write_text(FRAME)
    done = run(chromium, tmp_path / "frame.html", "--dump-dom", "--virtual-time-budget=20000")
    says = "the run has ended, or its page could not be renewed. Written"
    assert re.search(rf'"late":\["was running","Not renewed for \d+ minutes: {says}', done.stdout)
    assert "CONSOLE" not in done.stderr


@pytest.mark.slow
def test_without_script_and_on_paper_the_still_charts_are_seen(chromium: Path, tmp_path: Path) -> None:
    page = page_of(tmp_path, steps=300)
    without = re.sub('script-src [^"]*', "script-src 'none'", page)
    seen = {}
    for name, text in (("with", page), ("without", without), ("empty", re.sub(r"<path[^>]*>", "", without))):
        (tmp_path / f"{name}.html").write_text(text, encoding="utf-8")
        shot, paper = (tmp_path / f"{name}.{kind}" for kind in ("png", "pdf"))
        run(chromium, tmp_path / f"{name}.html", f"--screenshot={shot}", "--window-size=800,2500")
        run(chromium, tmp_path / f"{name}.html", f"--print-to-pdf={paper}")
        seen[name] = (shot.stat().st_size, paper.stat().st_size)
    assert seen["with"][1] == pytest.approx(seen["without"][1], rel=0.02)  # the same on paper
    assert all(seen["without"][place] > 1.05 * seen["empty"][place] for place in (0, 1))


@pytest.mark.slow
def test_a_page_of_a_million_steps_is_small(tmp_path: Path) -> None:
    page = page_of(tmp_path, steps=1_000_000, step_ms=5.0, interval_s=5.0, log_every=1000, gpus=2)
    assert len(page.encode()) < 400_000


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("steps.csv", "step,time_s,wait_ms\n1,2,x\n\x00,,\n7"),
        ("steps.csv", ""),
        ("telemetry.csv", "time_s,phase,gpu,util_pct\n1,train,0,nan\n2,train,0,inf\n3,walk,q,5\n"),
        ("metrics.csv", "step,epoch,time_s,split,name,value\n1,0,1,train,loss,inf\n2,0,2,train,loss,nan\n"),
        ("metrics.csv", "\xff\xfe,,,"),
    ],
)
def test_a_damaged_or_missing_table_leaves_the_rest(file: str, text: str, tmp_path: Path) -> None:
    made_run(tmp_path, steps=60)
    (tmp_path / file).write_text(text, encoding="latin-1")
    for _ in range(2):
        evidence = Evidence.read(tmp_path)
        conclude(evidence)
        page = to_html(evidence, tmp_path)
        assert "60 steps in" in page
        assert 'class="l"' in page
        (tmp_path / file).unlink(missing_ok=True)
