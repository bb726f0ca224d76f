"""Batches on their way to simulated cards in whole runs: nothing is used before it is there, each card has its own."""

import json
from pathlib import Path

import pytest
import torch

from tests.end_to_end.commands import FAST, Done, only_folder, record_of, run, train
from tests.fake_cuda.machine import FakeCuda

RUN = ("trainer.max_steps=8", "trainer.validate_every_steps=3", "logger=none", "telemetry.ceiling_steps=3")
LOADERS = ("baseline", "conservative", "balanced", "aggressive", "auto")
LAGGING = {"mib": 8192, "slowdown": 3.0, "strict": True}
"""A card that is behind the host; what is unordered ends the run."""


def check_ordered(report: Path, num_processes: int = 1) -> None:
    """No process has used anything that nothing orders."""
    seen = [json.loads(line) for line in report.read_text().splitlines()]
    used = [each for each in seen if each["launches"]]
    assert len(used) == num_processes
    assert [each["violations"] for each in used] == [[]] * num_processes


def evaluated_again(folder: Path, cwd: Path, **more: str) -> dict[str, float]:
    """Test metrics of the best checkpoint, by one process."""
    done = run("evaluate.py", f"checkpoint={folder / 'checkpoints' / 'best.ckpt'}", cwd=cwd, **more)
    assert done.code == 0, done.text
    return dict(json.loads((folder / "evaluation.json").read_text())["metrics"])


def check_test_metrics(folder: Path, expected: dict[str, float]) -> None:
    found = {name: value for name, value in record_of(folder)["metrics"].items() if name.startswith("test/")}
    assert found.keys() == expected.keys() != set()
    assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("num_cards", [2, 4])
def test_ranks_have_cards_of_their_own_and_share_an_evaluation(
    tmp_path: Path, fake_cuda: FakeCuda, num_cards: int
) -> None:
    cards = fake_cuda.environment(cards=num_cards, report=tmp_path / "report", **LAGGING)
    asked = ("trainer=ddp", f"trainer.devices={num_cards}", "memory.micro_batch=128", "loader=balanced")
    done = train(*RUN, *asked, cwd=tmp_path, **cards)
    assert done.code == 0, done.text
    check_ordered(tmp_path / "report", num_cards)
    folder = only_folder(tmp_path)
    assert record_of(folder)["status"] == "ok"
    alone = fake_cuda.environment(cards=1, **LAGGING)
    check_test_metrics(folder, evaluated_again(folder, tmp_path, **alone))


@pytest.mark.slow
def test_a_sharded_model_is_trained_and_evaluated_as_a_whole_one(tmp_path: Path, fake_cuda: FakeCuda) -> None:
    """Clipping, validation, and a feature table that the whole model fills. Lightning trains it."""
    metrics = {}
    for trainer in ("ddp", "fsdp"):
        folder = tmp_path / trainer
        folder.mkdir()
        # Not strict: in the second micro-batch torch zeroes what gradients of frozen weights would be, on a stream that
        # nothing orders (FlatParamHandle._writeback_orig_params). Nobody reads them.
        cards = fake_cuda.environment(cards=2, **{**LAGGING, "strict": False})
        asked = (f"trainer={trainer}", "memory=cache", "gpu.precision=32-true")
        done = train(*RUN, *asked, "trainer.gradient_clip=0.05", "loader=balanced", cwd=folder, **cards)
        assert done.code == 0, done.text
        record = record_of(only_folder(folder))
        assert record["plan"]["memory.features"]["value"] == "cache"
        metrics[trainer] = {
            name: value for name, value in record["metrics"].items() if name.startswith(("train", "val", "test"))
        }
    whole, shards = metrics["ddp"], metrics["fsdp"]
    assert {name: shards[name] for name in whole} == pytest.approx(whole, rel=1e-3)


@pytest.mark.slow
def test_a_sharded_model_goes_on_from_its_checkpoint(tmp_path: Path, fake_cuda: FakeCuda) -> None:
    """With the optimizer's state of the whole model; the weights are those of the unbroken run."""
    cards = fake_cuda.environment(cards=2, **{**LAGGING, "strict": False})
    asked = ("trainer=fsdp", "gpu.precision=32-true", "loader=balanced", "trainer.checkpoint_every_steps=2")
    states, checkpoint = [], "null"
    for name in ("whole", "rest"):
        (tmp_path / name).mkdir()
        done = train(*RUN, *asked, "trainer.max_steps=4", f"resume={checkpoint}", cwd=tmp_path / name, **cards)
        assert done.code == 0, done.text
        kept = only_folder(tmp_path / name) / "checkpoints"
        states.append(torch.load(kept / "last.ckpt", weights_only=True))
        checkpoint = str(kept / "last-1.ckpt")
    whole, rest = states
    for name, value in whole["state_dict"].items():
        torch.testing.assert_close(rest["state_dict"][name], value, rtol=1e-5, atol=1e-6)
    assert whole["optimizer_states"][0]["state"].keys() == rest["optimizer_states"][0]["state"].keys()


def run_small(fake_cuda: FakeCuda, cwd: Path, *arguments: str) -> Done:
    cards = fake_cuda.environment(report=cwd / "report", **LAGGING)
    return run(Path(__file__).with_name("smaller_card.py"), *FAST, *RUN, *arguments, cwd=cwd, ROOM_MIB="60", **cards)


@pytest.mark.slow
@pytest.mark.parametrize("loader", LOADERS)
def test_nothing_is_used_before_it_is_there(tmp_path: Path, fake_cuda: FakeCuda, loader: str) -> None:
    done = train(*RUN, f"loader={loader}", cwd=tmp_path, **fake_cuda.environment(report=tmp_path / "report", **LAGGING))
    assert done.code == 0, done.text
    check_ordered(tmp_path / "report")


@pytest.mark.slow
@pytest.mark.parametrize("loader", LOADERS)
def test_nor_where_memory_runs_out_and_steps_are_done_again(tmp_path: Path, fake_cuda: FakeCuda, loader: str) -> None:
    done = run_small(fake_cuda, tmp_path, f"loader={loader}", "workload.effective_batch_size=16384")
    assert done.code == 0, done.text
    assert [event["kind"] for event in record_of(only_folder(tmp_path))["events"]].count("step_down") > 0
    check_ordered(tmp_path / "report")
