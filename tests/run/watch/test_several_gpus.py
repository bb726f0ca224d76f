"""``wellfed watch`` on one process that drives several simulated GPUs (torch.nn.DataParallel)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.fake_nvml.driver import FakeDriver, FakeGpu, Scenario, Wave
from tests.kit.few import slow
from tests.run.watch.test_watched_script import SCRIPTS, WATCH, ended, folder_of, on_card, record_of

pytestmark = pytest.mark.usefixtures("fake_cuda")

PARALLEL = SCRIPTS / "data_parallel.py"


# GPUs of a DataParallel and its event: the test below. What is found in them, and in stalls: test_swing.py,
# rules/test_stalls.py and rules/compute/test_data_parallel.py in tests/explain/diagnosis.


@pytest.mark.parametrize(
    ("how", "gpus", "module"),
    [slow("--inner", ["0", "1", "2"], "layers"), ("--one-gpu", ["0"], None)],
)
def test_only_gpus_that_are_used_are_recorded(
    how: str, gpus: list[str], module: str | None, tmp_path: Path, fake_driver: FakeDriver
) -> None:
    """An idle one would make a busy training seem idle."""
    cards = on_card(tmp_path, fake_driver, cards=3, kernel_us=500)
    done = ended(*WATCH, PARALLEL, how, "--seconds", "2", cwd=tmp_path, **cards)
    assert done.returncode == 0, done.stderr
    record = record_of(tmp_path)
    assert [*record.gpus] == gpus
    assert len(record.machine["gpus"]) == 3
    rows = (folder_of(tmp_path) / "telemetry.csv").read_text().splitlines()[1:]
    assert {row.split(",")[3] for row in rows} == {"-1", *gpus}
    modules = [event["module"] for event in record.events if event["kind"] == "data_parallel"]
    assert modules == ([] if module is None else [module])


LOOP = """
import torch
from torch.utils.data import DataLoader, TensorDataset
from wellfed import GPUWatch
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4))).to("cuda:1")
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(torch.randn(480, 64)), batch_size=8)
with GPUWatch(quiet=True) as watch:
    for (x,) in watch.batches(loader):
        x = x.to("cuda:1")
        model({before}x).mean().backward()
        optimizer.step()
print(watch.summary["steps"])
"""


@pytest.mark.parametrize("how", [WATCH, ()], ids=["wellfed watch", "GPUWatch"])
def test_a_training_on_another_gpu_than_the_current_one(
    how: tuple[str, ...], tmp_path: Path, fake_driver: FakeDriver
) -> None:
    """Its kernels are timed, and nothing is put on the current one."""
    report = tmp_path / "report"
    cards = on_card(tmp_path, fake_driver, cards=2, kernel_us=500) | {"FAKE_CUDA_REPORT": str(report)}
    (tmp_path / "train.py").write_text(LOOP.format(before=""))
    done = ended(*how, "train.py", cwd=tmp_path, **cards)
    assert (done.returncode, done.stdout) == (0, "57\n"), done.stderr
    if not how:  # a simulated card, unlike a real one, is begun by the question whether its stream records a graph
        assert [json.loads(line)["contexts"] for line in report.read_text().splitlines()] == [[1]]
    else:
        record = record_of(tmp_path)
        assert record.time is not None
        assert record.time["compute_frac"] > 0.6  # events on the other GPU would count nearly all as copies
        assert [*record.gpus] == ["1"]
        assert not [event for event in record.events if event["kind"] == "unseen"]


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [
        ({}, {"0": "the fast one"}),
        # NVML's order makes it the slow one, which the script does not use.
        ({"CUDA_VISIBLE_DEVICES": "0"}, {}),
    ],
)
def test_gpus_are_numbered_as_torch_does_where_cards_differ(
    visible: dict[str, str], gpus: dict[str, str], tmp_path: Path, fake_driver: FakeDriver
) -> None:
    """CUDA numbers the fastest first, NVML by their slots."""
    cards = on_card(tmp_path, fake_driver, cards=2, kernel_us=500)
    slots = [
        FakeGpu(f"GPU-aaaa1111-0000-0000-0000-{card + 1:012d}", name, total_gib=2, util=Wave(1.0), simulated_card=card)
        for card, name in ((1, "the slow one"), (0, "the fast one"))
    ]
    cards |= {"FAKE_NVML_SCENARIO": fake_driver.environment(Scenario(slots))["FAKE_NVML_SCENARIO"]} | visible
    (tmp_path / "train.py").write_text(LOOP.format(before="").replace("cuda:1", "cuda:0"))
    done = ended(*WATCH, "train.py", cwd=tmp_path, **cards)
    assert done.returncode == 0, done.stderr
    record = record_of(tmp_path)
    names = {str(gpu["index"]): gpu["name"] for gpu in record.machine["gpus"]}
    assert {number: names[number] for number in record.gpus} == gpus
    assert all(one["util_pct"]["max"] > 30 for one in record.gpus.values())
    notes = [event["message"] for event in record.events if event["kind"] == "unseen"]
    assert ["the cards differ" in note for note in notes] == ([] if gpus else [True])
