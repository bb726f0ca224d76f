"""Data that come in DataLoaders or in a module of Lightning's are planned, swept and resumed as our own."""

import json
import shutil
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.end_to_end.commands import Done, only_folder, record_of, train_own
from tests.fake_cuda.machine import FakeCuda

OPTIMIZER = "{_target_: torch.optim.AdamW, lr: 0.01}"


@pytest.fixture
def user(tmp_path: Path) -> Path:
    """A user's own configuration folder and module; no batch size is set."""
    shutil.copy(Path(__file__).with_name("brought_data.py"), tmp_path)
    folder = tmp_path / "configs" / "workload"
    folder.mkdir(parents=True)

    def workload(name: str, model: str, data: str, optimizer: str = "null") -> None:
        text = f"name: {name}\nmodel: {{_target_: brought_data.{model}}}\ndata: {data}\noptimizer: {optimizer}\n"
        (folder / f"{name}.yaml").write_text(text)

    workload("plain", "Plain", "{_target_: brought_data.loaders}", OPTIMIZER)
    workload("module", "Module", "{_target_: brought_data.loaders}")
    workload("sets", "Module", "{_target_: brought_data.Sets}")
    workload("own", "ModuleWithLoaders", "null")
    return tmp_path


def train(user: Path, workload: str, *arguments: str, **more: Any) -> Done:
    return train_own(user, workload, *arguments, **more)


def steps(folder: Path) -> list[list[int]]:
    return [list(map(int, line.split())) for line in (folder / "steps").read_text().splitlines()]


def planned(folder: Path, *knobs: str) -> list[object]:
    plan = record_of(folder)["plan"]
    return [plan[knob]["value"] for knob in knobs]


@pytest.mark.slow
def test_a_data_module_is_set_up_once_and_its_loaders_are_used_as_they_came(user: Path) -> None:
    done = train(user, "sets", "trainer.max_epochs=2")
    assert done.code == 0, done.text
    folder = only_folder(user, "sets")
    record = record_of(folder)
    assert (record["status"], record["steps"], record["samples"]) == ("ok", 14, 200)
    assert planned(folder, "workload.effective_batch_size", "loader.backend") == [16, "own"]
    assert "its DataLoader, as it came" in record["plan"]["workload.effective_batch_size"]["because"]
    assert {"val/loss", "test/loss"} <= set(record["metrics"])
    hooks = (user / "hooks").read_text().splitlines()
    assert hooks[:2] == ["prepare_data", "setup fit"]
    assert [line.partition(" ")[0] for line in hooks].count("setup") == 2  # for training and for the test
    seen = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["Sets"]["seen"]
    assert seen == 14
    epochs = steps(user)[:7], steps(user)[7:14]
    assert [sorted(chain.from_iterable(epoch)) for epoch in epochs] == [list(range(100))] * 2
    assert epochs[0] != epochs[1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["shuffled", "weighted", "batches", "own"])
@pytest.mark.parametrize("workload", ["plain", "sets"])
def test_a_resumed_run_sees_the_samples_that_the_unbroken_one_does(user: Path, workload: str, kind: str) -> None:
    arguments = ["trainer.max_epochs=3", f"+workload.data.kind={kind}"]
    done = train(user, workload, *arguments, "trainer.checkpoint_every_steps=1", "trainer.keep_last=100")
    assert done.code == 0, done.text
    whole = only_folder(user, workload)
    (num_steps,) = [record_of(whole)["steps"]]
    at = num_steps // 2 + 1
    (user / "elsewhere").mkdir()
    checkpoint = whole / "checkpoints" / f"last-{num_steps - at}.ckpt"
    done = train(user, workload, f"resume={checkpoint}", *arguments, cwd=user / "elsewhere")
    assert done.code == 0, done.text
    resumed = only_folder(user / "elsewhere", workload)
    states = [
        torch.load(each / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"] for each in (whole, resumed)
    ]
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name
    if workload == "sets":
        assert steps(user / "elsewhere")[: num_steps - at] == steps(user)[at:num_steps]


@pytest.mark.slow
def test_a_batch_samplers_lists_are_the_steps(user: Path) -> None:
    done = train(user, "module", "trainer.max_epochs=1", "+workload.data.kind=batches")
    assert done.code == 0, done.text
    assert [len(step) for step in steps(user)[:24]] == [6, 2] * 12
    assert planned(only_folder(user, "module"), "workload.effective_batch_size") == [6]
    refused = record_of(only_folder(user, "module"))["refused"]
    assert refused == ["loader.device_prefetch", "workload.effective_batch_size"]


@pytest.mark.slow
def test_a_typed_knob_changes_nothing_else(user: Path) -> None:
    for name, words in {"as_it_came": (), "changed": ("loader.num_workers=1", "loader.prefetch_factor=3")}.items():
        (user / name).mkdir()
        done = train(user, "module", *words, "trainer.max_epochs=2", cwd=user / name)
        assert done.code == 0, done.text
        folder = only_folder(user / name, "module")
        knobs = ("backend", "num_workers", "prefetch_factor", "persistent_workers", "pin_memory", "timeout_s")
        expected = [1, 3] if words else [0, None]
        assert planned(folder, *(f"loader.{knob}" for knob in knobs)) == ["own", *expected, False, False, 0]
    assert steps(user / "as_it_came")[:14] == steps(user / "changed")[:14]
    done = train(user, "plain", "trainer.max_steps=2", "+workload.data.kind=whole")
    assert done.code == 0, done.text


@pytest.mark.slow
def test_a_module_with_loaders_of_its_own(user: Path) -> None:
    done = train(user, "own", "trainer.max_epochs=1")
    assert done.code == 0, done.text
    assert record_of(only_folder(user, "own"))["steps"] == 5
    assert (user / "hooks").read_text().splitlines() == ["prepare_data", "setup fit"]
    assert steps(user)[:5] == [list(range(low, low + 8)) for low in range(0, 40, 8)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["shuffled", "own", "batches"])
def test_two_ranks_share_the_batches_of_a_plain_model(user: Path, kind: str) -> None:
    found = []
    for devices in (1, 2):
        cwd = user / f"{devices}"
        cwd.mkdir()
        more = ("trainer.accelerator=cpu", f"trainer.devices={devices}", f"+workload.data.kind={kind}")
        done = train(user, "plain", *more, "trainer.max_epochs=2", "telemetry.ceiling_steps=0", cwd=cwd)
        assert done.code == 0, done.text
        record = record_of(only_folder(cwd, "plain"))
        found.append([record[name] for name in ("status", "steps", "samples")])
    assert found[0] == found[1]
    assert found[0][0] == "ok"


@pytest.mark.slow
def test_on_a_card_its_hooks_are_called_once_a_batch(user: Path, fake_cuda: FakeCuda, tmp_path: Path) -> None:
    report = tmp_path / "report"
    cards = fake_cuda.environment(cards=1, mib=8192, slowdown=2, report=report)
    more = ("loader.num_workers=1", "loader.device_prefetch=2")
    done = train(user, "sets", "trainer.max_epochs=2", *more, **cards)
    assert done.code == 0, done.text
    folder = only_folder(user, "sets")
    assert planned(folder, "trainer.accelerator", "loader.device_prefetch") == ["gpu", 0]
    state = torch.load(folder / "checkpoints" / "last.ckpt", map_location="cpu", weights_only=True)
    assert state["Sets"]["seen"] == 14
    (process,) = [entry for line in report.read_text().splitlines() if (entry := json.loads(line))["contexts"]]
    assert process["violations"] == []


REFUSED = [
    ("plain", ["data.kind=unbatched"], "is null, and the DataLoader does not say it: how many samples has a step?"),
    ("plain", ["data.kind=whole", "loader.num_workers=2"], "WholeBatches has an __iter__ of its own"),
    ("plain", ["loader.backend=threads"], "DataLoader over Told builds its batches itself"),
    ("plain", ["data=Told"], "is null, and there is no DataLoader: how many samples has a step?"),
    ("plain", ["data=Plain"], "brought_data.Plain returned Plain, and a workload's data is a wellfed.Datasets"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("workload", "typed", "told"), REFUSED)
def test_what_can_not_be_is_told_before_training(user: Path, workload: str, typed: list[str], told: str) -> None:
    def override(text: str) -> str:
        knob, _, value = text.partition("=")
        if knob == "data":
            return "workload.data=null" if value == "null" else f"workload.data._target_=brought_data.{value}"
        if knob.startswith("data."):
            return f"+workload.{text}"
        return text if knob.startswith("loader") else f"workload.{text}"

    done = train(user, workload, *map(override, typed), "trainer.max_steps=2")
    assert done.code == 2, done.text
    assert told in done.err
    assert "Traceback" not in done.text
