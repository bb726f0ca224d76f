"""What a run looks like in a terminal of 80 columns and 24 lines."""

import os
import re
import struct
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.end_to_end.commands import FAST, ROOT, environment, only_folder, record_of, run

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="has no pseudo-terminals")
QUICK = ("logger=none", "telemetry=none", "loader.backend=inline")


@dataclass
class Shown:
    """What a terminal was sent, without what moves its cursor."""

    code: int = 0
    first_sign_s: float = 0.0
    text: str = ""
    lines: list[str] = field(default_factory=list)


def in_terminal(*arguments: str, cwd: Path, columns: int = 80, **environ: str) -> Shown:
    """Run ``src/train.py`` in a pseudo-terminal."""
    import fcntl
    import pty
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    variables = {name: value for name, value in environment(TERM="xterm", **environ).items() if name != "COLUMNS"}
    began_s, shown, got = time.monotonic(), Shown(), b""
    command = [sys.executable, str(ROOT / "src" / "train.py"), *FAST, *arguments]
    with subprocess.Popen(command, cwd=cwd, env=variables, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # how Linux says that the other end is closed
                break
            if not part:
                break
            if not got:
                shown.first_sign_s = time.monotonic() - began_s
            got += part
    os.close(ours)
    shown.code, shown.text = process.returncode, got.decode()
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\]8;[^\\]*\\", "", shown.text)
    shown.lines = [line.rstrip() for line in re.split(r"[\r\n]+", plain)]
    return shown


@pytest.mark.slow
def test_a_run_at_80_columns(tmp_path: Path) -> None:
    shown = in_terminal("trainer.max_steps=60", "trainer.log_every_steps=5", *QUICK, cwd=tmp_path)
    assert shown.code == 0, shown.text
    assert "Training recsys: importing PyTorch" in shown.text
    assert shown.first_sign_s < 5  # one on a machine of one's own
    start = [line for line in shown.lines if line.startswith(("recsys  ", "batch  ", "loader  ", "data  ", "folder  "))]
    assert len(start) == 5
    assert max(map(len, start)) <= 80
    bars = [line for line in shown.lines if re.search(r"\d+/60", line)]
    assert bars
    assert all(re.search(r"\d+/60 \d:\d\d:\d\d ETA [\d:-]+$", bar) and len(bar) <= 80 for bar in bars), bars
    assert any(re.match(r"[\d,]+ triplets/s  train/loss \d", line) for line in shown.lines)
    assert any(re.match(r"(GPU|wait) \d+ %", line) for line in shown.lines)
    folder = only_folder(tmp_path)
    assert f"folder  logs/recsys/runs/{folder.name}" in shown.lines
    end = shown.lines[next(at for at, line in enumerate(shown.lines) if re.match(r" [A-Z -]{7,}  ", line)) :]
    assert len([line for line in end if line]) <= 15
    assert any(re.fullmatch(r" 60 steps in .*, ended by trainer.max_steps=60", line) for line in end)
    assert f" Report   logs/recsys/runs/{folder.name}/report.html" in end
    assert f"file://{folder}/report.html" in shown.text
    assert "ok:" not in shown.text
    assert record_of(folder)["ended_by"] == "trainer.max_steps=60"


BROKEN = """
name: broken
effective_batch_size: 4
model:
  _target_: their_model.Net
data:
  _target_: their_model.data
optimizer:
  _target_: torch.optim.SGD
  lr: 0.1
"""
THEIR_MODEL = """
import torch
from wellfed.contract import Datasets, LossOutput

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def loss(self, batch):
        return LossOutput(self.deeper(batch))

    def deeper(self, batch):
        if len(batch) == 4:
            raise KeyError("what they did not think of")
        return self.layer(batch).mean()

def data():
    return Datasets(torch.ones(18, 4))
"""


@pytest.mark.slow
def test_a_users_own_error_shows_their_frames_first_and_the_log_has_all(tmp_path: Path) -> None:
    (tmp_path / "configs" / "workload").mkdir(parents=True)
    (tmp_path / "configs" / "workload" / "broken.yaml").write_text(BROKEN)
    (tmp_path / "their_model.py").write_text(THEIR_MODEL)
    where = ("--config-dir", str(tmp_path / "configs"), "workload=broken")
    done = run("train.py", *where, *QUICK, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert done.code == 1, done.text
    shown = [Path(line.split('"')[1]).name for line in done.err.splitlines() if line.startswith('  File "')]
    assert shown == ["their_model.py", "their_model.py"]
    assert "KeyError: 'what they did not think of'" in done.err
    folder = only_folder(tmp_path, "broken")
    assert re.search(r"^\(\d+ frames of libraries are left out: all are in logs/.*train.log\)$", done.err, re.MULTILINE)
    log = (folder / "train.log").read_text()
    assert "train_step.py" in log
    assert "their_model.py" in log
