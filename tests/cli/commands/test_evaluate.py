"""What evaluate.py refuses: in one message, without a traceback, with nothing written."""

import json
import sys
from pathlib import Path

import pytest
import torch

from tests.end_to_end.commands import FAST, Done, run
from tests.kit.composed import compose
from tests.kit.few import slow
from wellfed.cli import main as cli
from wellfed.cli.commands import entry_scripts
from wellfed.config import compose as app
from wellfed.record.entries import RunRecord
from wellfed.run.objects.assemble import make_objects

FOREIGN = {"global_step": 3, "state_dict": {"other": torch.zeros(500)}}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Writes a checkpoint of another program beside the record of a run."""
    path = tmp_path / "a b (1)" / "checkpoints" / "x=y.ckpt"
    path.parent.mkdir(parents=True)
    record = RunRecord.start("a b (1)")
    record.overrides = list(FAST)
    record.config = compose(list(FAST)).resolved
    record.write(path.parents[1])
    torch.save(FOREIGN, path)
    return path


def refused(checkpoint: Path, tmp_path: Path) -> Done:
    done = run("evaluate.py", f"checkpoint={checkpoint}", "accelerator=cpu", cwd=tmp_path)
    assert done.code == 2, done.text
    assert done.err.startswith("1 fault in the configuration; nothing was run.\n")
    assert str(checkpoint) in done.err
    assert "Traceback" not in done.text
    assert not (checkpoint.parents[1] / "evaluation.json").exists()
    return done


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        (None, "b/checkpoints/best.ckpt"),
        slow("last", "b/checkpoints/best.ckpt"),
        ("2026-01", "a/checkpoints/last.ckpt"),
    ],
)
def test_a_run_stands_for_its_best_checkpoint(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    asked: str | None,
    found: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, files in {"2026-01-01_a": ("last",), "2026-02-01_b": ("best", "last"), "2025-01-01_c": ()}.items():
        folder = tmp_path / "logs" / "recsys" / "runs" / name
        (folder / "checkpoints").mkdir(parents=True)
        RunRecord.start(name).write(folder)
        for file in files:
            (folder / "checkpoints" / f"{file}.ckpt").write_bytes(b"no checkpoint")
    assert cli.main(["evaluate", *([] if asked is None else [f"checkpoint={asked}"])]) == 2
    assert f"{found}: is not a checkpoint that can be read." in capsys.readouterr().err
    assert cli.main(["evaluate", "checkpoint=2025"]) == 2
    assert "2025-01-01_c: has no checkpoint. Name another run" in capsys.readouterr().err


@pytest.mark.slow
def test_weights_that_do_not_fit(checkpoint: Path, tmp_path: Path) -> None:
    done = refused(checkpoint, tmp_path)
    assert f"checkpoint={checkpoint}: " in done.err
    assert "model.user_embedding.weight: absent there" in done.err
    assert "Set workload.* as it was" in done.err
    assert len(done.err) < 800


@pytest.fixture
def good(checkpoint: Path) -> Path:
    """The same, with the weights of its model."""
    model = make_objects(compose(list(FAST)).config).model
    weights = {f"model.{name}": value for name, value in model.state_dict().items()}
    torch.save({"global_step": 3, "state_dict": weights}, checkpoint)
    return checkpoint


@pytest.fixture(autouse=True)
def no_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides pytest's own arguments from evaluate, which looks for --config-dir there."""
    monkeypatch.setattr(sys, "argv", ["evaluate.py"])


def evaluated(checkpoint: Path) -> int:
    return entry_scripts.evaluate_composed(app.compose([f"checkpoint='{checkpoint}'"], "evaluate"))


def test_what_was_trained_on_a_card_is_evaluated_without(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = json.loads((good.parents[1] / "run.json").read_text())
    record["overrides"] += ["gpu.precision=16-mixed", "gpu.memory_gib=999", "gpu.enforce=true"]
    (good.parents[1] / "run.json").write_text(json.dumps(record))
    assert evaluated(good) == 0
    assert "test/recall_at_10 " in capsys.readouterr().out


def test_a_configuration_that_has_changed_since_is_refused(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = json.loads((good.parents[1] / "run.json").read_text())
    workload = record["config"]["workload"]
    workload["optimizer"]["lr"] = 0.5  # test figures depend neither on it nor on the batch size
    workload["effective_batch_size"] = 77
    workload["data"]["path"] = "/old/ratings.csv"
    (good.parents[1] / "run.json").write_text(json.dumps(record))
    assert evaluated(good) == 2
    err = capsys.readouterr().err
    assert "1 fault in the configuration" in err
    assert "workload.data.path: is null now and was /old/ratings.csv in the run of the checkpoint. Set it back" in err
    assert not (good.parents[1] / "evaluation.json").exists()


@pytest.mark.simulated(mib=2)
def test_a_card_that_is_too_small_is_said(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluated(good) == 3
    err = capsys.readouterr().err
    assert "out of memory" in err
    assert err.endswith("accelerator=cpu evaluates without the card.\n")


def damage(checkpoint: Path) -> None:
    checkpoint.write_bytes(checkpoint.read_bytes().replace(bytes(100), b"\xff" * 100, 1))


UNREADABLE = "is not a checkpoint that can be read. Name another, e.g. last-1.ckpt.\n"


def test_a_damaged_checkpoint(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(checkpoint)
    assert evaluated(checkpoint) == 2
    err = capsys.readouterr().err
    assert "1 fault in the configuration; nothing was run.\n" in err
    assert str(checkpoint) in err
    assert "Traceback" not in err
    assert err.endswith(UNREADABLE)
    assert not (checkpoint.parents[1] / "evaluation.json").exists()


def test_another_error_of_the_pass_stays_what_it_is(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from wellfed.run.passes.base import RunPasses

    def broken(*_: object) -> None:
        raise RuntimeError("a bug in the model")

    monkeypatch.setattr(RunPasses, "check_fits", broken)
    composed = app.compose([f"checkpoint='{checkpoint}'", "accelerator=cpu"], "evaluate")
    assert entry_scripts.evaluate_composed(composed) == 1
    shown = capsys.readouterr().err
    assert shown.startswith(f'Traceback (most recent call last):\n  File "{__file__}"')
    assert "\nRuntimeError: a bug in the model\n" in shown
