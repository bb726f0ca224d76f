"""``wellfed watch`` on simulated cards: copies, precision, memory, several GPUs of one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fake_nvml.driver import FakeDriver
from tests.watch.watching import (
    SCRIPTS,
    WATCH,
    ended,
    findings_of,
    notes_of,
    on_card,
    record_of,
    rows_of,
    watched,
)
from wellfed.explain.diagnosis.script_words import OWN_STREAM

pytestmark = [pytest.mark.usefixtures("fake_cuda"), pytest.mark.slow]


def test_unpinned_copies_are_found(tmp_path: Path, fake_driver: FakeDriver) -> None:
    card = on_card(tmp_path, fake_driver, copy_gbps=0.5, pageable_gbps=0.02)
    words = ["--images", "2400", "--batch-size", "32", "--epochs", "1"]
    done = ended(*WATCH, SCRIPTS / "classify.py", *words, cwd=tmp_path, **card)
    assert done.returncode == 0, done.stderr
    record = record_of(tmp_path)
    (finding,) = [one for one in record.findings if one["id"] == "slow_copy"]
    assert finding["change"][0] == "DataLoader(pin_memory=True)"
    assert record.time is not None
    assert record.time["copy_frac"] is not None
    assert record.time["copy_frac"] > 0.2
    assert record.gpus["0"]["util_pct"]["n"] > 0
    assert record.plan["trainer.accelerator"]["value"] == "gpu"


def test_settings_memory_and_gpus_of_a_process_that_drives_two(tmp_path: Path, fake_driver: FakeDriver) -> None:
    """Autocast that begins within the model, the peak though the script resets torch's own, and no idle third card."""
    code = """
import time, torch
class Net(torch.nn.Linear):
    @torch.autocast("cuda", torch.bfloat16)
    def forward(self, x):
        return super().forward(x)
model = torch.nn.DataParallel(Net(4, 1).cuda(), [0, 1])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
large = torch.empty(512 * 2**20, dtype=torch.uint8, device="cuda")
for _ in range(20):
    model(torch.zeros(8, 4).cuda()).sum().backward()
    optimizer.step()
    time.sleep(0.1)
del large
torch.cuda.empty_cache()
torch.cuda.reset_peak_memory_stats()
"""
    record = watched(code, tmp_path, **on_card(tmp_path, fake_driver, cards=3))
    assert record.config["gpu"]["precision"] == "mixed"
    assert record.memory["measured_peak_gib"] == pytest.approx(0.5, abs=0.1)
    assert ([*record.gpus], len(record.machine["gpus"])) == (["0", "1"], 3)
    (event,) = [event for event in record.events if event["kind"] == "data_parallel"]
    assert (event["module"], event["devices"]) == ("DataParallel", 2)


COPIES = """
import torch
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4))).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(torch.randn(640, 256), torch.randn(640, 256)), batch_size=16, pin_memory=True)
def train(x, y):
    loss = (model(x) - y).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    loss.item()
"""
IN_TURN = """
for x, y in loader:
    train(x.cuda(), y.cuda())
"""
AHEAD = """
side = torch.cuda.Stream()
class Ahead:
    def __init__(self):
        self.batches = iter(loader)
        self.read()
    def read(self):
        self.next = next(self.batches, None)
        with torch.cuda.stream(side):
            self.next = self.next and [each.cuda(non_blocking=True) for each in self.next]
    def __iter__(self):
        while self.next is not None:
            torch.cuda.current_stream().wait_stream(side)
            batch = self.next
            [each.record_stream(torch.cuda.current_stream()) for each in batch]
            self.read()
            yield batch
for batch in Ahead():
    train(*batch)
"""


@pytest.mark.parametrize(
    ("loop", "copy_frac", "note"),
    [
        pytest.param(IN_TURN, (0.1, 0.7), None, id="in turn"),
        pytest.param(AHEAD, (0.0, 0.1), OWN_STREAM, id="ahead of its step"),
    ],
)
def test_a_copy_is_what_copying_takes(
    loop: str, copy_frac: tuple[float, float], note: str | None, tmp_path: Path, fake_driver: FakeDriver
) -> None:
    """Two copies of 1 ms beside kernels of 0.5 ms."""
    card = on_card(tmp_path, fake_driver, copy_gbps=0.016, kernel_us=500)
    record = watched(COPIES + loop, tmp_path, **card)
    assert record.time is not None
    assert copy_frac[0] <= (record.time["copy_frac"] or 0.0) <= copy_frac[1], record.time
    assert notes_of(record) == ([] if note is None else [note])
    rows = rows_of(tmp_path)[4:]
    spent_ms = sum(float(row[name]) for row in rows[1:] for name in ("wait_ms", "copy_ms", "compute_ms", "host_ms"))
    assert spent_ms < 1.1e3 * (float(rows[-1]["time_s"]) - float(rows[0]["time_s"]))


@pytest.mark.parametrize("work_s", [0.0, 0.01])
def test_what_the_loop_does_with_a_batch_before_it_is_copied_is_found(
    work_s: float, tmp_path: Path, fake_driver: FakeDriver
) -> None:
    loop = f"import time\nfor x, y in loader:\n    time.sleep({work_s})\n    train(x.cuda(), y.cuda())\n"
    record = watched(COPIES + loop, tmp_path, **on_card(tmp_path, fake_driver, kernel_us=500))
    assert ("slow_callbacks" in findings_of(record)) == (work_s > 0)


WITHOUT_LOADER = """
import time, torch
model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
def batch(): return torch.zeros(8, 64).cuda(), torch.zeros(8, 64).cuda()
@torch.no_grad()
def estimate():
    for _ in range(20):
        x, y = batch()
        (model(x) - y).mean().item()
for number in range(60):
    if number % 20 == 0: estimate()
    x, y = batch()
    (model(x) - y).mean().backward()
    optimizer.step()
"""


def test_a_validation_of_a_loop_without_a_loader_is_no_step(tmp_path: Path, fake_driver: FakeDriver) -> None:
    record = watched(WITHOUT_LOADER, tmp_path, **on_card(tmp_path, fake_driver, kernel_us=500))
    assert (record.steps, record.phases["validate"]["times"]) == (60, 2)  # the first is before any step


@pytest.mark.parametrize("how", [WATCH, ()], ids=["wellfed watch", "GPUWatch"])
def test_a_training_on_another_gpu_than_the_current_one(
    how: tuple[str, ...], tmp_path: Path, fake_driver: FakeDriver
) -> None:
    """Its kernels are timed."""
    cards = on_card(tmp_path, fake_driver, cards=2, kernel_us=500)
    (tmp_path / "train.py").write_text(
        """
import torch
from torch.utils.data import DataLoader, TensorDataset
from wellfed import GPUWatch
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4))).to("cuda:1")
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(torch.randn(480, 64)), batch_size=8)
with GPUWatch(quiet=True) as watch:
    for (x,) in watch.batches(loader):
        model(x.to("cuda:1")).mean().backward()
        optimizer.step()
print(watch.summary["steps"])
"""
    )
    done = ended(*how, "train.py", cwd=tmp_path, **cards)
    assert done.returncode == 0, done.stderr
    if not how:
        assert done.stdout == "57\n"
    record = record_of(tmp_path)
    assert record.time is not None
    assert record.time["compute_frac"] > 0.6  # events on the other GPU would count nearly all as copies
    assert [*record.gpus] == (["1"] if how else ["0", "1"])
    assert not notes_of(record)
