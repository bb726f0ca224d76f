import dataclasses
import re
import signal
import time
from pathlib import Path

import pytest
import torch

from tests.end_to_end.commands import (
    only_folder,
    record_of,
    run,
    run_folders,
    start,
    start_warm,
    train,
    weights_of,
)
from tests.kit.few import slow
from tests.kit.tables import rows_of
from wellfed.record.entries import RunRecord

NO_TRACEBACK = "Traceback (most recent call last)"


def test_the_main_command_leaves_the_whole_record(tmp_path: Path) -> None:
    arguments = ("gpu=24gb", "loader=aggressive", "trainer.max_steps=30", "trainer.log_every_steps=10")
    done = train(*arguments, cwd=tmp_path)  # in a Python of its own: tests/template/test_installed.py
    assert done.code == 0, done.text
    if not torch.cuda.is_available():
        assert "gpu=24gb: no NVIDIA GPU here" in done.err
        assert "the budget of 21.6 GiB is not enforced" in done.err
    assert done.out.splitlines()[1].startswith("recsys  ")
    assert re.search(r"of [\d,]+ (possible|without loading)", done.out)
    folder = only_folder(tmp_path)
    record = record_of(folder)
    assert set(record) == {field.name for field in dataclasses.fields(RunRecord)}
    assert (record["status"], record["exit_code"], record["steps"]) == ("ok", 0, 30)
    assert record["overrides"][-4:] == [*arguments]
    assert {"test/ndcg_at_10", "val/ndcg_at_10", "train/loss"} <= set(record["metrics"])
    shares = [record["time"][name] for name in ("wait_frac", "copy_frac", "compute_frac", "host_frac")]
    assert sum(share or 0 for share in shares) == pytest.approx(1, abs=0.01)
    phases = [record["time"][f"{name}_frac"] for name in ("forward", "backward", "optimizer")]
    assert 0.5 * record["time"]["compute_frac"] < sum(phases) <= record["time"]["compute_frac"]
    assert all(share > 0 for share in phases)
    assert record["time"]["device_forward_ms"] is None or torch.cuda.is_available()
    assert record["throughput"]["samples_per_s"] > 0
    assert record["ceiling"]["samples_per_s"] > 0
    assert 0 <= record["readiness_frac"] <= 1
    assert record["wandb"]["mode"] == "offline"
    assert list((folder / "wandb").glob("offline-run-*/*.wandb"))
    assert all(
        item["because"] and item["source"] in ("set", "predicted", "measured", "data")
        for item in record["plan"].values()
    )
    assert record["plan"]["loader.backend"]["value"] == "threads"
    steps = rows_of(folder / "steps.csv")
    assert [int(row["step"]) for row in steps] == list(range(1, 31))
    assert sum(int(row["samples"]) for row in steps) == record["samples"]
    times = [float(row["time_s"]) for row in steps]
    assert times == sorted(times)
    assert [row["warmup"] for row in steps] == ["1"] * 3 + ["0"] * 27
    names = {(row["split"], row["name"]) for row in rows_of(folder / "metrics.csv")}
    assert {("train", "loss"), ("train", "lr"), ("val", "ndcg_at_10"), ("test", "recall_at_10")} <= names
    for name in (
        "report.html",
        "report.md",
        "train.log",
        ".hydra/config.yaml",
        ".hydra/overrides.yaml",
        "checkpoints/last.ckpt",
        "checkpoints/best.ckpt",
    ):
        assert (folder / name).stat().st_size > 0, name
    state = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
    assert state["global_step"] == 30


@pytest.mark.slow
def test_equal_seeds_give_equal_runs_whatever_the_loader(tmp_path: Path) -> None:
    results = []
    for loader in ("baseline", "aggressive", "auto"):
        cwd = tmp_path / loader
        cwd.mkdir()
        arguments = (f"loader={loader}", "trainer.max_steps=6", "logger=none", "telemetry=none")
        done = train(*arguments, cwd=cwd, fresh=loader == "baseline")  # nor does it matter what else was imported
        assert done.code == 0, done.text
        folder = only_folder(cwd)
        results.append((record_of(folder)["plan"]["loader.backend"]["value"], weights_of(folder)))
    assert [backend for backend, _ in results[:2]] == ["torch", "threads"]
    assert results[2][0] in ("inline", "threads")  # as timed
    for _, state in results[1:]:
        assert all(torch.equal(value, results[0][1][name]) for name, value in state.items())


@pytest.mark.slow
def test_two_ranks_learn_what_one_does(tmp_path: Path) -> None:
    states = []
    for devices in (1, 2):
        cwd = tmp_path / str(devices)
        cwd.mkdir()
        done = train(
            f"trainer.devices={devices}",
            "workload.effective_batch_size=501",
            "trainer.max_epochs=1",
            # Ranks must agree on what is saved when: by the metric (here the first is the best), by the clock.
            "trainer.validate_every_steps=3",
            "trainer.best_metric=ndcg_at_10",
            "trainer.best_mode=min",
            "trainer.checkpoint_minutes=0.0001",
            "telemetry=none",
            "logger=none",
            cwd=cwd,
            fresh=devices > 1,
        )
        assert done.code == 0, done.text
        folder = only_folder(cwd)
        record = record_of(folder)
        assert record["steps"] > 5
        states.append((record, weights_of(folder)))
    (one, alone), (two, together) = states
    assert two["plan"]["trainer.strategy"]["value"] == "ddp"
    assert two["samples"] == one["samples"]  # ragged tail included, no sample twice
    for name, value in alone.items():
        assert (value - together[name]).abs().max() < 1e-4, name
    assert two["metrics"]["train/loss"] == pytest.approx(one["metrics"]["train/loss"], rel=1e-4)  # over both ranks
    assert two["metrics"]["test/ndcg_at_10"] == pytest.approx(one["metrics"]["test/ndcg_at_10"], abs=5e-3)
    assert one["ranks"] == []
    assert [(rank["rank"], rank["node"], rank["gpu"]) for rank in two["ranks"]] == [(0, 0, None), (1, 0, None)]
    for rank in two["ranks"]:
        assert rank["wait_frac"] + rank["compute_frac"] + rank["host_frac"] == pytest.approx(1)
        assert rank["peak_gib"] > 0
    assert "Ranks side by side" in (folder / "report.html").read_text()
    assert "2 ranks wait for data between" in (folder / "report.md").read_text()


def interrupt(signum: int, cwd: Path, *arguments: str, fresh: bool = False) -> tuple[int | None, str]:
    """Start a long run and signal it once it has written a checkpoint."""
    process = (start if fresh else start_warm)(
        "train.py",
        "workload.data.scale=0.02",
        "trainer.max_epochs=4000",
        "trainer.checkpoint_every_steps=5",
        *arguments,
        cwd=cwd,
    )
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if list(cwd.glob("logs/recsys/runs/*/checkpoints/last-1.ckpt")):
            break
        time.sleep(0.05)
    process.send_signal(signum)
    out, err = process.communicate(timeout=120)
    return process.returncode, out + err


@pytest.mark.slow
def test_an_interrupted_run_resumes_in_its_folder_and_its_wandb_run(tmp_path: Path) -> None:
    code, text = interrupt(signal.SIGTERM, tmp_path, fresh=True)
    assert code == 143, text
    assert NO_TRACEBACK not in text
    folder = only_folder(tmp_path)
    first = record_of(folder)
    assert first["status"] == "interrupted"
    assert [event["kind"] for event in first["events"]][-1] == "signal"
    state = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
    assert state["global_step"] == first["steps"]  # nothing of what was reached is lost
    goal = first["steps"] + 7
    done = run(
        "train.py",
        "resume=auto",
        "workload.data.scale=0.02",
        f"trainer.max_steps={goal}",
        "telemetry=none",
        cwd=tmp_path,
    )
    assert done.code == 0, done.text
    assert only_folder(tmp_path) == folder
    second = record_of(folder)
    assert (second["status"], second["steps"]) == ("ok", goal)
    assert second["wandb"]["id"] == first["wandb"]["id"]
    assert len(second["wandb"]["parts"]) == 2
    steps = rows_of(folder / "steps.csv")
    assert [int(row["step"]) for row in steps] == list(range(1, goal + 1))
    assert [row["warmup"] for row in steps[first["steps"] :]] == ["1"] * 3 + ["0"] * 4
    assert second["duration_s"] > first["duration_s"]
    refused = run("train.py", f"resume={folder}", "seed=2", "workload.model.dim=32", cwd=tmp_path)
    assert refused.code == 2
    assert "seed: is 2 now and was 1" in refused.err
    assert "workload.model.dim: is 32 now and was 64" in refused.err
    assert record_of(folder) == second
    rerun = run("train.py", f"rerun={folder}", "trainer.max_steps=3", "logger=none", "telemetry=none", cwd=tmp_path)
    assert rerun.code == 0, rerun.text
    assert "trainer.max_steps=3" in rerun.out  # the limit that ended it
    assert len(run_folders(tmp_path)) == 2


@pytest.mark.slow
def test_ctrl_c_is_130_and_a_kill_reads_as_killed(tmp_path: Path) -> None:
    from wellfed.record.entries import read

    code, text = interrupt(signal.SIGINT, tmp_path, "logger=none")
    assert code == 130, text
    assert NO_TRACEBACK not in text
    assert read(only_folder(tmp_path))["status"] == "interrupted"
    killed = tmp_path / "killed"
    killed.mkdir()
    code, _ = interrupt(signal.SIGKILL, killed, "logger=none")
    assert code == -signal.SIGKILL
    assert record_of(only_folder(killed))["status"] == "running"
    assert read(only_folder(killed))["status"] == "killed"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gpu.precision=16-mixed"], "gpu.precision"),
        slow(["workload.data.path=no/such/folder"], "no/such/folder"),
    ],
)
def test_what_can_not_run_is_exit_2_and_leaves_no_folder(tmp_path: Path, arguments: list[str], message: str) -> None:
    if torch.cuda.is_available() and "precision" in message:
        pytest.skip("a GPU can do it")
    done = train(*arguments, "logger=none", cwd=tmp_path)
    assert done.code == 2, done.text
    assert message in done.err
    assert NO_TRACEBACK not in done.text
    assert not run_folders(tmp_path)


@pytest.mark.slow
def test_a_resumed_run_keeps_count(tmp_path: Path) -> None:
    assert train("trainer.max_steps=12", "logger=none", "telemetry=none", "hydra.run.dir=run", cwd=tmp_path).code == 0
    folder = tmp_path / "run"
    first = record_of(folder)
    nothing_left = run("train.py", "resume=run", cwd=tmp_path)
    assert nothing_left.code == 0, nothing_left.text
    assert "Nothing was left to train" in nothing_left.err
    again = record_of(folder)
    for name in ("steps", "samples", "epochs", "throughput", "time"):
        assert again[name] == first[name], name
    assert again["wall"]["steps_s"] == pytest.approx(first["wall"]["steps_s"], abs=0.01)
    more = run("train.py", "resume=run", "trainer.max_steps=16", cwd=tmp_path)
    assert more.code == 0, more.text
    last = record_of(folder)
    assert last["steps"] == 16
    parts = [record["wall"]["steps_s"] for record in (first, again, last)]
    assert parts == sorted(parts)
    times = [record["phases"]["validate"]["times"] for record in (first, again, last)]
    assert times == sorted(set(times))  # each of them held one more
    assert last["samples"] == sum(int(row["samples"]) for row in rows_of(folder / "steps.csv"))
    tests = [row for row in rows_of(folder / "metrics.csv") if row["split"] == "test"]
    assert {row["step"] for row in tests} == {"12", "16"}
