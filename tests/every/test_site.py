"""The site knows its repository by itself, and answers what users looked for on the first page of a search."""

from __future__ import annotations

import html
import http.server
import importlib.util
import json
import re
import shutil
import subprocess
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("site_of_docs", ROOT / "tools" / "site.py")  # Python has another site
assert SPEC is not None
assert SPEC.loader is not None
site = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(site)


@pytest.mark.parametrize(
    ("origin", "address"),
    [
        ("https://github.com/me/nets.git", "https://github.com/me/nets"),
        ("git@github.com:me/nets.git", "https://github.com/me/nets"),
        ("ssh://git@code.example.org/group/sub/nets", "https://code.example.org/group/sub/nets"),
        ("https://user:secret@code.example.org/me/nets/", "https://code.example.org/me/nets"),
        ("/home/me/nets", None),
        ("../nets", None),
        (None, None),
    ],
)
def test_the_address_is_that_of_the_checkout(origin: str | None, address: str | None, tmp_path: Path) -> None:
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    if origin is not None:
        subprocess.run(["git", "-C", tmp_path, "remote", "add", "origin", origin], check=True)
    assert site.repository({}, tmp_path) == address
    workflow = {"GITHUB_SERVER_URL": "https://git.example.org", "GITHUB_REPOSITORY": "a/b"}
    assert site.repository(workflow, tmp_path) == "https://git.example.org/a/b"


def test_no_address_of_a_repository_has_to_be_filled_in() -> None:
    assert "repo_url" not in yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    for name in ("README.md", "mkdocs.yml", "pyproject.toml", "{{cookiecutter.project_slug}}/README.md"):
        assert "github.com/OWNER" not in (ROOT / name).read_text(), name


LOOKED_FOR = {
    "wandb tags": "recipes/wandb_tags",
    "wandb run name": "recipes/wandb_tags",
    "log an image": "recipes/log_images",
    "confusion matrix": "recipes/log_images",
    "freeze a layer": "recipes/freeze_layers",
    "class weights": "recipes/class_weights",
    "two optimizers": "recipes/two_optimizers",
    "resume on another machine": "recipes/resume_on_another_machine",
    "2 of 4 GPUs": "recipes/some_of_the_gpus",
    "TorchScript": "recipes/export",
    "notebook": "recipes/notebook",
    "ImageFolder": "recipes/image_folder",
    "timm": "recipes/timm",
    "mixup": "recipes/mixup",
    "docker": "recipes/containers",
    "macOS": "recipes/macos_and_windows",
    "ModuleNotFoundError hydra": "faq",
    "text column collator": "hugging_face",
    "linear warm-up": "hugging_face",
    "save_pretrained": "hugging_face",
    "failed trial error": "faq",
    "NaN in a batch": "record",
    "loss is not a scalar": "workloads",
    "batch_size lr": "faq",
    "training got slower CI": "slower_in_ci",
    "resume OneCycleLR": "callbacks",
    "ModelCheckpoint best.ckpt": "faq",
    "which weights were tested": "faq",
    "ceiling time": "record",
    "which knob mattered": "sweep",
    "predict_step": "recipes/predictions",
    "val_loss early stopping": "callbacks",
    "allow_targets": "faq",
    "hyperparameter search": "search",
    "screen 80 columns": "screens",
}
"""What users asked and did not find at once -> page that answers it."""
SEARCHED = """<!doctype html><body><pre id="found"></pre>
<iframe src="/index.html" width="1300" height="900"></iframe><script>
const wait = async seconds => { for (let at = 0; at < 4 * seconds; at++) await fetch("/wait?" + Math.random()); };
const within = node => node.shadowRoot || [...node.children].map(within).find(Boolean);
addEventListener("load", async () => {
  const page = document.querySelector("iframe").contentDocument, found = {};
  await wait(1);
  page.querySelector(".md-search__button").click();
  await wait(1);
  const root = within(page.body), input = root.querySelector("input");
  for (const words of WORDS) {
    input.value = words;
    input.dispatchEvent(new Event("input", {bubbles: true}));
    for (let times = 0; times < 8 && !root.querySelector("a"); times++) await wait(0.5);
    await wait(0.5);
    found[words] = [...root.querySelectorAll("a")].map(link => link.getAttribute("href"));
    input.value = "";
    input.dispatchEvent(new Event("input", {bubbles: true}));
    await wait(0.25);
  }
  document.getElementById("found").textContent = JSON.stringify(found);
});
</script></body>"""


class Slow(http.server.SimpleHTTPRequestHandler):
    """Serves the site, and an address that takes a while: the browser's own clock does not wait for its workers."""

    def do_GET(self) -> None:
        if not self.path.startswith("/wait"):
            return super().do_GET()
        time.sleep(0.25)
        self.send_response(204)
        return self.end_headers()

    def log_message(self, *_: object) -> None:
        """Stays quiet."""


@pytest.mark.slow
def test_one_search_finds_what_users_asked(chromium: Path, tmp_path: Path) -> None:
    """On the first page of results, in the search of the built site."""
    assert site.main() == 0
    built = tmp_path / "site"
    shutil.copytree(ROOT / "build" / "site", built)
    (built / "searched.html").write_text(SEARCHED.replace("WORDS", json.dumps([*LOOKED_FOR])))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Slow, directory=built)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
        address = f"http://127.0.0.1:{server.server_port}/searched.html"
        done = subprocess.run(
            [chromium, *flags, "--virtual-time-budget=600000", "--dump-dom", address],
            capture_output=True, text=True, timeout=240, check=True,
        )  # fmt: skip
        server.shutdown()
    told = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert told is not None
    found = json.loads(html.unescape(told[1]))
    pages = {words: [re.sub(r"^.*?//[^/]*/|/?[#?].*", "", link).strip("/") for link in found[words]] for words in found}
    assert {words: pages[words] for words, page in LOOKED_FOR.items() if page not in pages[words]} == {}
