"""``wellfed watch`` on small training scripts: what they compute stays, and what slows them down is found."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.end_to_end.commands import environment, run
from tests.fake_cuda.machine import Cards, machine_environment
from tests.fake_nvml.driver import FakeDriver
from tests.kit.few import few
from wellfed.explain.diagnosis.script_words import OWN_STREAM
from wellfed.record.entries import RunRecord

SCRIPTS = Path(__file__).with_name("scripts")
WATCH = ("-m", "wellfed", "watch")


def ended(*command: str | Path, cwd: Path, fresh: bool = False, **more: str) -> subprocess.CompletedProcess[str]:
    """Runs Python with these arguments to its end, in a copy of one that has imported torch already.

    Args:
        fresh: whether it is a Python of its own: for what an import of torch or a traceback shows.
    """
    words = [*map(str, command)]
    if fresh:
        return subprocess.run(
            [sys.executable, *words], cwd=cwd, env=environment(**more), capture_output=True, text=True, timeout=300
        )
    script = words[0] if words[0] == "-m" else cwd / words[0]
    done = run(script, *words[1:], cwd=cwd, **more)
    return subprocess.CompletedProcess(words, done.code, done.out, done.err)


def folder_of(cwd: Path) -> Path:
    (found,) = (cwd / "logs" / "watch" / "runs").iterdir()
    return found


def record_of(cwd: Path) -> RunRecord:
    return RunRecord.read(folder_of(cwd))


def rows_of(cwd: Path) -> list[dict[str, str]]:
    with (folder_of(cwd) / "steps.csv").open() as stream:
        return list(csv.DictReader(stream))


def findings_of(record: RunRecord) -> list[str]:
    """Without the remark that the tests' machine is shared."""
    return [finding["id"] for finding in record.findings if finding["id"] != "busy_machine"]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("classify.py", ["--workers", "2", "--images", "160", "--output"]),
        pytest.param(
            *("classify.py", ["--workers", "1", "--images", "64", "--context", "spawn", "--output"]),
            marks=pytest.mark.slow,
        ),
        ("two_players.py", []),
    ],
    ids=["workers", "spawned workers", "two models"],
)
def test_nothing_changes_in_what_a_script_computes(script: str, arguments: list[str], tmp_path: Path) -> None:
    """Weights, printed losses, random draws of process and workers, bit for bit."""
    alone = ended(SCRIPTS / script, *arguments, tmp_path / "alone.pt", cwd=tmp_path)
    watched = ended(*WATCH, SCRIPTS / script, *arguments, tmp_path / "watched.pt", cwd=tmp_path)
    assert (watched.returncode, watched.stdout) == (alone.returncode, alone.stdout)
    assert alone.returncode == 0, alone.stderr
    assert same(torch.load(tmp_path / "alone.pt"), torch.load(tmp_path / "watched.pt"))
    assert "Report   logs/watch/runs/" in watched.stderr
    assert record_of(tmp_path).status == "ok"


def test_a_loop_without_a_loader(tmp_path: Path) -> None:
    """Also a whole model, saved while its calls are watched, is the same file and needs no wellfed."""
    alone = ended(SCRIPTS / "char_transformer.py", tmp_path / "alone.pt", cwd=tmp_path)
    watched = ended(*WATCH, SCRIPTS / "char_transformer.py", tmp_path / "watched.pt", cwd=tmp_path)
    assert watched.stdout == alone.stdout
    assert (tmp_path / "watched.pt").read_bytes().count(b"wellfed") == 0
    record = record_of(tmp_path)
    assert record.steps == 60
    assert "No DataLoader was iterated" in watched.stderr
    assert record.throughput is not None
    assert record.throughput["sample_unit"] == "steps"
    assert record.epochs is None
    assert record.phases["validate"]["times"] >= 2  # of three, the first is before any step
    assert record.phases["checkpoint"]["times"] == 1
    assert record.process is not None
    assert record.process["parameter_values"] > 10_000


def test_nothing_is_compiled_again(tmp_path: Path) -> None:
    """Nor are there other graphs, or a trace of the watch in saved, scripted and copied models. Its loaders are gone
    while they are iterated over."""
    alone = ended(SCRIPTS / "compiled.py", cwd=tmp_path)
    watched = ended(*WATCH, SCRIPTS / "compiled.py", cwd=tmp_path)
    assert alone.stdout.count("'unique_graphs': 1") == 3
    assert (watched.returncode, watched.stdout) == (0, alone.stdout)
    assert "is compiled: its forward pass is not told apart" in watched.stderr
    assert "No DataLoader" not in watched.stderr
    assert record_of(tmp_path).samples == 4 * 2 * 80


@pytest.fixture(scope="module")
def starved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A script whose training process reads slowly stored pictures itself."""
    folder = tmp_path_factory.mktemp("starved")
    words = ["--read-ms", "2", "--images", "800"]
    return folder, ended(*WATCH, SCRIPTS / "classify.py", *words, cwd=folder)


def test_a_slow_dataset_is_found(starved: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, done = starved
    record = record_of(folder)
    assert done.returncode == 0
    assert findings_of(record)[0] == "loading_in_main_process"
    (finding,) = [one for one in record.findings if one["id"] == "loading_in_main_process"]
    assert re.fullmatch(r"DataLoader\(num_workers=\d+, persistent_workers=True\)", finding["change"][0])
    assert record.time is not None
    assert record.time["wait_frac"] > 0.6
    assert finding["change"][0] in done.stderr
    assert (record.steps, record.samples, record.epochs, record.workload) == (100, 1600, 2, "classify.py")
    assert record.plan["loader.num_workers"]["value"] == 0
    assert record.phases["validate"]["times"] == 2
    assert record.loading["batch_mib"] == pytest.approx(16 * (3 * 16 * 16 * 4 + 8) / 2**20)


def test_its_files_are_those_of_any_run(starved: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, _ = starved
    run = folder_of(folder)
    assert {path.name for path in run.iterdir()} >= {
        *("run.json", "steps.csv", "telemetry.csv", "report.md", "report.html")
    }
    rows = rows_of(folder)
    assert [int(row["step"]) for row in rows] == list(range(1, 101))
    assert {row["epoch"] for row in rows} == {"0", "1"}
    assert {(row["samples"], row["num_micro"]) for row in rows} == {("16", "1")}
    page = (run / "report.html").read_text()
    assert "classify.py" in page
    assert "DataLoader(num_workers=" in page
    again = ended("-m", "wellfed", "report", run, "--out", folder / "again", cwd=folder)
    assert again.returncode == 0, again.stderr
    assert "DataLoader(num_workers=" in (folder / "again" / "report.md").read_text()
    listed = ended("-m", "wellfed", "runs", cwd=folder)
    assert "classify.py" in listed.stdout


@pytest.mark.parametrize(
    "loop",
    [
        """
    for i, (x,) in enumerate(loader):
        model(x).mean().backward()
        if i % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
""",
        """
    batches = iter(loader)
    while read := list(itertools.islice(batches, 3)):  # as transformers' Trainer reads the batches of a step
        for (x,) in read:
            model(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
""",
    ],
    ids=["in turn", "read ahead"],
)
def test_accumulated_gradients_are_one_step(loop: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        f"""
import itertools, torch
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(480, 4)), batch_size=4)
for epoch in range(2):
{loop}
"""
    )
    assert ended(*WATCH, "train.py", cwd=tmp_path).returncode == 0
    rows = rows_of(tmp_path)
    assert len(rows) == 80
    assert {(row["samples"], row["micro_batch"], row["num_micro"]) for row in rows[1:]} == {("12", "4", "3")}
    assert record_of(tmp_path).config["workload"] == {"sample_unit": "samples", "effective_batch_size": 12}


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        ("torch.zeros(50, 8), torch.zeros(8)", {"8"}),  # as pad_sequence makes it
        pytest.param("torch.zeros(5, 8), torch.zeros(8)", {"8"}, marks=pytest.mark.slow),
        pytest.param("torch.zeros(1000, 4), torch.zeros(8)", {"8"}, marks=pytest.mark.slow),  # points of clouds
        ("torch.zeros(len(found), 4), torch.zeros(len(found))", {"8", "4"}),
    ],
)
def test_samples_of_batches_of_any_layout(batch: str, samples: set[str], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        f"""
import torch
from torch.utils.data import DataLoader
w = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([w], lr=0.1)
for x, y in DataLoader(range(100), batch_size=8, collate_fn=lambda found: ({batch})):
    (w * x.sum()).backward()
    optimizer.step()
"""
    )
    done = ended(*WATCH, "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert {row["samples"] for row in rows_of(tmp_path)} == samples


def test_a_library_that_searches_torch_before_its_import(tmp_path: Path) -> None:
    """As transformers and datasets do."""
    (tmp_path / "train.py").write_text(
        """
import importlib.util
print(importlib.util.find_spec("torch").name, importlib.util.find_spec("torch").name)
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    model(torch.randn(2, 4)).mean().backward()
    optimizer.step()
"""
    )
    done = ended(*WATCH, "train.py", cwd=tmp_path, fresh=True)
    assert (done.returncode, done.stdout) == (0, "torch torch\n")
    assert record_of(tmp_path).steps == 5


@pytest.mark.slow
def test_what_could_not_be_seen_is_said(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        """
import multiprocessing, torch
def train():
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(30):
        model(torch.randn(2, 4)).mean().backward()
        optimizer.step()
if __name__ == "__main__":
    process = multiprocessing.get_context("fork").Process(target=train)
    process.start()
    process.join()
    print(process.exitcode)
"""
    )
    done = ended(*WATCH, "train.py", cwd=tmp_path)
    assert done.stdout == "0\n"
    assert "no training was seen" in done.stderr
    assert "it forked 1 time, and those processes were not watched" in done.stderr
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize(
    "how",
    few(["os.kill(os.getpid(), signal.SIGKILL)", "os._exit(4)", "raise ValueError('a bad batch')"], 1),
)
def test_a_script_that_ends_in_training_leaves_a_record(how: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        f"""
import os, signal, time, torch
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def step(x):
    model(x).mean().backward()
    optimizer.step()
loader = DataLoader(TensorDataset(torch.randn(800, 4)), batch_size=4)
for number, (x,) in enumerate(loader):
    step(x)
    time.sleep(0.02)
    if number == 120:
        {how}
"""
    )
    raised = "raise" in how
    done, alone = ended(*WATCH, "train.py", cwd=tmp_path), ended("train.py", cwd=tmp_path, fresh=raised)
    assert (done.returncode, done.stdout) == (alone.returncode, alone.stdout)
    assert alone.stderr in done.stderr
    record = record_of(tmp_path)
    assert record.status == ("failed" if raised else "killed")
    assert (record.error is not None) == raised
    report = ended("-m", "wellfed", "report", folder_of(tmp_path), cwd=tmp_path)
    assert report.returncode == 0, report.stderr
    assert "slow_callbacks" in (folder_of(tmp_path) / "report.md").read_text()


@pytest.mark.slow
def test_a_failure_of_the_watch_leaves_the_script_alone(tmp_path: Path) -> None:
    """No folder can be made, neither in the log dir nor in the temporary one."""
    (tmp_path / "file").write_text("")
    words = ["--images", "64", "--epochs", "1"]
    alone = ended(SCRIPTS / "classify.py", *words, cwd=tmp_path)
    blocked = {"TMPDIR": str(tmp_path / "temporary")}
    (tmp_path / "temporary").mkdir()
    user = os.getuid()
    (tmp_path / "temporary" / f"wellfed-{user}").write_text("")
    done = ended(*WATCH, "--log-dir", "file", SCRIPTS / "classify.py", *words, cwd=tmp_path, **blocked)
    assert (done.returncode, done.stdout) == (0, alone.stdout)
    assert "watches no more" in done.stderr


def on_card(folder: Path, fake_driver: FakeDriver, **cards: Any) -> dict[str, str]:
    return machine_environment(fake_driver, folder, Cards(mib=2048, **cards))


@pytest.mark.usefixtures("fake_cuda")
def test_unpinned_copies_are_found(tmp_path: Path, fake_driver: FakeDriver) -> None:
    card = on_card(tmp_path, fake_driver, copy_gbps=0.5, pageable_gbps=0.02)
    words = ["--images", "2400", "--batch-size", "32", "--epochs", "1"]
    done = ended(*WATCH, SCRIPTS / "classify.py", *words, cwd=tmp_path, **card)
    assert done.returncode == 0, done.stderr
    record = record_of(tmp_path)
    (finding,) = [one for one in record.findings if one["id"] == "slow_copy"]
    assert finding["change"][0] == "DataLoader(pin_memory=True)"
    assert "in a torch.cuda.Stream of its own" in finding["change"][1]
    assert record.time is not None
    assert record.time["copy_frac"] is not None
    assert record.time["copy_frac"] > 0.2
    assert record.gpus["0"]["util_pct"]["n"] > 0
    assert record.plan["trainer.accelerator"]["value"] == "gpu"


@pytest.mark.usefixtures("fake_cuda")
@pytest.mark.parametrize(
    ("wrap", "precision"),
    [
        ("model.forward = torch.autocast('cuda', torch.bfloat16)(model.forward)", "mixed"),  # as Accelerate does
        pytest.param("torch.autocast('cuda').__enter__()", "mixed", marks=pytest.mark.slow),
        pytest.param("model.forward = torch.autocast('cuda', enabled=False)(model.forward)", "32-true"),
        pytest.param("model.__class__ = type('FSDPModule', (torch.nn.Linear,), {})", None, marks=pytest.mark.slow),
    ],
)
def test_mixed_precision_is_seen(wrap: str, precision: str | None, tmp_path: Path, fake_driver: FakeDriver) -> None:
    """Also if it begins within the model. Sharded weights may be computed with in another type, unseen."""
    (tmp_path / "train.py").write_text(
        f"""
import torch
model = torch.nn.Linear(4, 1).cuda()
{wrap}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(20):
    model(torch.zeros(8, 4).cuda()).sum().backward()
    optimizer.step()
    with torch.no_grad(), torch.autocast("cuda"):
        model.bias + 1
"""
    )
    done = ended(*WATCH, "train.py", cwd=tmp_path, **on_card(tmp_path, fake_driver))
    assert done.returncode == 0, done.stderr
    assert record_of(tmp_path).config["gpu"].get("precision") == precision


@pytest.mark.parametrize(
    ("setting", "tf32"),
    [
        ("torch.backends.cuda.matmul.fp32_precision = 'tf32'", True),
        pytest.param("torch.backends.cuda.matmul.fp32_precision = 'ieee'", False, marks=pytest.mark.slow),
        pytest.param("torch.set_float32_matmul_precision('high')", True, marks=pytest.mark.slow),
        pytest.param("", False, marks=pytest.mark.slow),
    ],
)
def test_tf32_is_seen_however_it_is_set(setting: str, tf32: bool, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        f"""
import torch
{setting}
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    model(torch.randn(2, 4)).mean().backward()
    optimizer.step()
"""
    )
    done = ended(*WATCH, "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    record = record_of(tmp_path)
    assert record.config["gpu"] == {"precision": "32-true", "tf32": tf32, "compile": "none"}
    notes = [event["message"] for event in record.events if event["kind"] == "unseen"]
    assert [note[:26] for note in notes] == ["No DataLoader was iterated"]


@pytest.mark.usefixtures("fake_cuda")
def test_the_peak_of_memory_is_that_of_the_training(tmp_path: Path, fake_driver: FakeDriver) -> None:
    """Also where a script resets torch's own figure, as at the end of each epoch."""
    (tmp_path / "train.py").write_text(
        """
import torch
model = torch.nn.Linear(4, 1).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
large = torch.empty(512 * 2**20, dtype=torch.uint8, device="cuda")
for _ in range(20):
    model(torch.zeros(8, 4).cuda()).sum().backward()
    optimizer.step()
del large, model, optimizer
torch.cuda.empty_cache()
torch.cuda.reset_peak_memory_stats()
print(torch.cuda.max_memory_reserved() >> 20)
"""
    )
    done = ended(*WATCH, "train.py", cwd=tmp_path, **on_card(tmp_path, fake_driver))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 512
    record = record_of(tmp_path)
    assert "GPU" in record.memory["device"]
    assert record.memory["measured_peak_gib"] == pytest.approx(0.5, abs=0.1)


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
EVALUATED = """
with torch.no_grad():
    for x, y in loader:
        found = model(model(model(x.cuda())))
        (found - y.cuda()).mean().item()
"""


@pytest.mark.usefixtures("fake_cuda")
@pytest.mark.parametrize(
    ("loop", "copy_frac", "note"),
    [
        pytest.param(AHEAD, (0.0, 0.1), OWN_STREAM, id="ahead of its step"),
        pytest.param(EVALUATED, (0.1, 0.7), None, id="after a pass that is not seen"),
    ],
)
def test_a_copy_is_what_copying_takes(
    loop: str, copy_frac: tuple[float, float], note: str | None, tmp_path: Path, fake_driver: FakeDriver
) -> None:
    """Two copies of 1 ms beside kernels of 0.5 ms, wherever the script makes them."""
    (tmp_path / "train.py").write_text(COPIES + loop)
    card = on_card(tmp_path, fake_driver, copy_gbps=0.016, kernel_us=500)
    done = ended(*WATCH, "train.py", cwd=tmp_path, **card)
    assert done.returncode == 0, done.stderr
    record = record_of(tmp_path)
    assert record.time is not None
    assert copy_frac[0] <= (record.time["copy_frac"] or 0.0) <= copy_frac[1], record.time
    notes = [event["message"] for event in record.events if event["kind"] == "unseen"]
    assert notes == ([] if note is None else [note])
    parts = ("wait_ms", "copy_ms", "compute_ms", "host_ms")
    rows = rows_of(tmp_path)[4:]
    spent_ms = sum(float(row[name]) for row in rows[1:] for name in parts)
    assert spent_ms < 1.1e3 * (float(rows[-1]["time_s"]) - float(rows[0]["time_s"]))
    if note is not None:
        assert not any("non_blocking" in text for one in record.findings for text in one["change"])


@pytest.mark.usefixtures("fake_cuda")
def test_warnings_and_modes_are_left_alone(tmp_path: Path, fake_driver: FakeDriver) -> None:
    """Nor is a device waited for after an error, which may be its own."""
    (tmp_path / "train.py").write_text(
        """
import torch, warnings
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Linear(4, 1).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for (x,) in DataLoader(TensorDataset(torch.zeros(40, 4)), batch_size=4):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss = model(x.cuda()).sum()
        loss.backward()
        optimizer.step()
        loss.item()
    print(torch.cuda.get_sync_debug_mode(), warnings.filters, warnings.showwarning)
torch.cuda.synchronize = lambda *of: print("waits")
raise ValueError("of the script")
"""
    )
    card = on_card(tmp_path, fake_driver)
    alone, done = ended("train.py", cwd=tmp_path, **card), ended(*WATCH, "train.py", cwd=tmp_path, **card)
    assert "of the script" in alone.stderr
    without_addresses = [re.sub("0x[0-9a-f]+", "", one.stdout) for one in (alone, done)]
    assert without_addresses[0] == without_addresses[1]
    assert record_of(tmp_path).status == "failed"
    assert record_of(tmp_path).steps >= 3


def test_loaders_and_models_of_any_kind_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        """
import functools, torch
torch.manual_seed(0)
from torch.utils.data import DataLoader
class Cached(DataLoader):
    def _get_iterator(self):
        return iter([torch.ones(2, 4)] * 3)
class Unhashable(DataLoader):
    def __eq__(self, other):
        return True
class Model(torch.nn.Linear):
    pass
model = Model(4, 1)
Model.__call__ = functools.partial(lambda x: model.forward(x))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for loader in (Cached(range(3)), Unhashable(torch.ones(8, 4), batch_size=2)):
    for x in loader:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
print(model.weight.tolist())
"""
    )
    alone, done = ended("train.py", cwd=tmp_path), ended(*WATCH, "train.py", cwd=tmp_path)
    assert alone.returncode == 0, alone.stderr
    assert (done.returncode, done.stdout) == (0, alone.stdout), done.stderr
    assert record_of(tmp_path).steps == 7
    assert "Batches of a DataLoader could not be seen" in done.stderr


def test_workers_of_a_stream_are_advised_with_a_split(tmp_path: Path) -> None:
    """Without one each worker repeats all samples."""
    (tmp_path / "train.py").write_text(
        """
import time, torch
from torch.utils.data import DataLoader, IterableDataset
class Stream(IterableDataset):
    def __iter__(self):
        for _ in range(480):
            time.sleep(0.003)
            yield torch.randn(4)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in DataLoader(Stream(), batch_size=8):
    model(x).sum().backward()
    time.sleep(0.008)
    optimizer.step()
"""
    )
    done = ended(*WATCH, "train.py", cwd=tmp_path)
    record = record_of(tmp_path)
    (finding,) = [one for one in record.findings if one["id"] == "loading_in_main_process"]
    workers, split = finding["change"]
    assert workers.startswith("DataLoader(num_workers=")
    assert split == "split the stream by get_worker_info(), else each worker repeats all samples"
    assert split in done.stderr


def test_a_batch_of_validation_within_training(tmp_path: Path) -> None:
    """Its time is no wait of the training."""
    (tmp_path / "train.py").write_text(
        """
import time, torch
from torch.utils.data import DataLoader, TensorDataset
class Slow(TensorDataset):
    def __getitems__(self, indices):
        time.sleep(0.05)
        return [self[index] for index in indices]
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
val = DataLoader(Slow(torch.randn(64, 4)), batch_size=64)
for i, (x,) in enumerate(DataLoader(TensorDataset(torch.randn(480, 4)), batch_size=8)):
    optimizer.zero_grad()
    model(x).mean().backward()
    time.sleep(0.01)
    optimizer.step()
    if i % 3 == 2:
        (y,) = next(iter(val))
        with torch.no_grad():
            model(y)
"""
    )
    assert ended(*WATCH, "train.py", cwd=tmp_path).returncode == 0
    record, rows = record_of(tmp_path), rows_of(tmp_path)
    assert {row["samples"] for row in rows} == {"8"}
    assert record.steps == 60
    assert record.time is not None
    assert record.time["wait_frac"] < 0.3
    assert record.phases["validate"]["times"] == 20
    assert record.phases["validate"]["total_s"] > 18 * 0.05  # the first is recognised after its time


LOADERS = """
import torch
from torch.utils.data import DataLoader, TensorDataset
def loader(): return DataLoader(TensorDataset(torch.randn(80, 4)), batch_size=8)
def train(batches):
    for (x,) in batches:
        model(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
def evaluate(batches, most=100):
    for i, (x,) in enumerate(batches):
        if i == most:
            break
        with torch.no_grad():
            model(x)
def ahead(batches):
    batches = iter(batches)
    next_one = next(batches)
    for following in batches:
        yield next_one
        next_one = following
    yield next_one
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
first, val = loader(), loader()
train(first)
"""


@pytest.mark.parametrize(
    ("before", "again"),
    [
        ("next(iter(one))", "train(one)"),
        pytest.param("pass", "train(ahead(one))", marks=pytest.mark.slow),
        pytest.param("one = first; next(iter(val))", "train(one)", marks=pytest.mark.slow),
    ],
)
def test_a_loader_is_trained_with_after_other_uses(before: str, again: str, tmp_path: Path) -> None:
    """Folds of a cross-validation, each with a DataLoader of its own."""
    folds = f"for fold in range(3):\n    one = loader()\n    {before}\n    {again}\n    evaluate(val)\n"
    (tmp_path / "train.py").write_text(LOADERS + folds)
    assert ended(*WATCH, "train.py", cwd=tmp_path).returncode == 0
    rows = rows_of(tmp_path)
    assert len(rows) == 40
    if "ahead" not in again:  # its first batches come before any pass
        assert {row["samples"] for row in rows} == {"8"}
    assert record_of(tmp_path).phases["validate"]["times"] <= 6
    assert record_of(tmp_path).epochs == 4
    assert all(row["forward_ms"] for row in rows[1:] if "evaluate" not in before)


def test_loops_within_one_another_count_each_sample_once(tmp_path: Path) -> None:
    """As of rollouts, from which small batches are drawn."""
    (tmp_path / "train.py").write_text(
        f"""{LOADERS}
for (rollout,) in DataLoader(TensorDataset(torch.randn(320, 4)), batch_size=32):
    train(DataLoader(TensorDataset(rollout), batch_size=8))
"""
    )
    assert ended(*WATCH, "train.py", cwd=tmp_path).returncode == 0
    assert [row["samples"] for row in rows_of(tmp_path)] == ["8"] * 50
    assert record_of(tmp_path).samples == 400


@pytest.mark.parametrize("most", ["3", pytest.param("100", marks=pytest.mark.slow)])
def test_a_training_without_a_loader_after_validations_with_one(most: str, tmp_path: Path) -> None:
    """Its passes are seen, and the validation's loader is not taken for its own."""
    slow = """
import time
class Slow(torch.nn.Linear):
    def forward(self, x):
        time.sleep(0.01)
        return super().forward(x)
"""
    head = LOADERS.replace("torch.nn.Linear(4, 1)", "Slow(4, 1)").replace("import torch", f"import torch{slow}", 1)
    steps = f"for _ in range(10):\n    train([(torch.randn(8, 4),)] * 2)\n    evaluate(val, {most})\n"
    (tmp_path / "train.py").write_text(head.replace("\ntrain(first)", "") + steps)
    assert ended(*WATCH, "train.py", cwd=tmp_path).returncode == 0
    rows = rows_of(tmp_path)
    assert [row["samples"] for row in rows] == ["1"] * 20
    assert sum(float(row["forward_ms"]) >= 10 for row in rows) >= 18 - 10 * (most == "3")


def test_a_model_that_is_trained_more_often(tmp_path: Path) -> None:
    """The other one's time is part of a step."""
    (tmp_path / "train.py").write_text(
        """
import time, torch
from torch.utils.data import DataLoader, TensorDataset
class Slow(torch.nn.Linear):
    def forward(self, x):
        time.sleep(0.05)
        return super().forward(x)
critic, maker = torch.nn.Linear(4, 1), Slow(4, 4)
of_critic = torch.optim.SGD(critic.parameters(), lr=0.01)
of_maker = torch.optim.SGD(maker.parameters(), lr=0.01)
for i, (x,) in enumerate(DataLoader(TensorDataset(torch.randn(240, 4)), batch_size=8)):
    of_critic.zero_grad()
    critic(x).mean().backward()
    of_critic.step()
    if i % 5 == 4:
        of_maker.zero_grad()
        critic(maker(x)).mean().backward()
        of_maker.step()
"""
    )
    assert ended(*WATCH, "train.py", cwd=tmp_path).returncode == 0
    rows = rows_of(tmp_path)
    assert [int(row["step"]) for row in rows] == list(range(1, 31))
    assert {(row["samples"], row["num_micro"]) for row in rows} == {("8", "1")}
    with_maker = [row for row in rows if int(row["step"]) % 5 == 1 and int(row["step"]) > 10]
    assert len(with_maker) == 4
    assert all(float(row["compute_ms"]) >= 50 for row in with_maker)


def test_steps_with_one_batch(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        """
import torch
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
(x,) = next(iter(DataLoader(TensorDataset(torch.randn(80, 4)), batch_size=8)))
for _ in range(50):
    optimizer.zero_grad()
    model(x).mean().backward()
    optimizer.step()
"""
    )
    assert ended(*WATCH, "train.py", cwd=tmp_path).returncode == 0
    record = record_of(tmp_path)
    assert (record.steps, record.samples) == (50, 400)
