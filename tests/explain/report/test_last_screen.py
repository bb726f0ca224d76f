"""The last screen of a run: its verdict first, where the time went, and a command that can be typed as it is."""

import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.text import Text

from tests.kit.evidence_of import evidence
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import Finding, Gain
from wellfed.explain.report.last_screen import last_lines, next_command
from wellfed.record.entries import FindingEntry, RunRecord

STARVED = Finding(
    "loading_in_main_process",
    "80 % of each step waits for data: the training process builds a batch itself. " + "The data has fetch. " * 9,
    {},
    ("loader=auto",),
    gain=Gain(4.0, 2.9, 4.4),
).entry()
BUSY = Finding("busy_machine", "Other programs took 1.0 of 2 cores.", {}, advice="Wait.", is_note=True).entry()
NOTE = Finding("memory_unused", "Words.", {}, is_note=True).entry()
ERROR = {"kind": "disk", "message": "No space left", "advice": "Free space."}


def starved(*overrides: str, **record: Any) -> Evidence:
    return evidence(
        wait_ms=80.0,
        copy_ms=1.0,
        compute_ms=18.0,
        host_ms=1.0,
        ceiling=5.0,
        **{
            "findings": [STARVED, NOTE],
            "overrides": list(overrides) or ["trainer.max_steps=60"],
            "readiness_frac": 0.0,
            "ended_by": "trainer.max_steps=60",
            "gpus": {"0": {"util_pct": {"mean": 3.0}, "power_w": {"mean": 69.0}}},
            "memory": {"device": "card", "budget_gib": 21.6, "measured_peak_gib": 0.5},
            "host": {"cpu_pct": 20.0, "rss_gib": 1.0},
            "metrics": {"train/loss": 0.25, "train/lr": 0.1, "val/ndcg_at_10": 0.07812, "test/ndcg_at_10": 0.07111},
            "tested": "the weights of best.ckpt of step 60 (best max of val/ndcg_at_10)",
            "wandb": {"id": "1", "mode": "offline", "path": "", "parts": ["logs/a b/wandb/offline-run-1"]},
            **record,
        },
    )


def lines_of(found: Evidence, folder: Path, width: int | None = 80) -> list[Text]:
    return list(last_lines(found, folder, width))


def shown(found: Evidence, folder: Path, width: int | None = None) -> str:
    return "\n".join(line.plain for line in lines_of(found, folder, width))


@pytest.fixture(autouse=True)
def script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["src/train.py", "trainer.max_steps=60"])


def test_a_starved_run_has_its_verdict_and_the_next_command(tmp_path: Path) -> None:
    first, *rest = lines_of(starved(), Path("logs/run"), None)
    assert first.plain.startswith(" STARVED  80 % of each step waits for data: the training process builds a batch")
    assert any(span.style == "red" for span in first.spans)
    text = "\n".join(line.plain for line in rest)
    for line in (
        "1,280 samples/s (1,254-1,306)  20.0 % of 6,400 possible  batches ready 0 %",
        "wait 80 %  compute 18 %  copy 1 %  host 1 %  step 100 ms",
        "GPU 3 %  memory 0.50 of 21.6 GiB  69 W  CPU 0.2 of 8 cores",
        "Try (about 4.0 times as fast (2.9 to 4.4), predicted):",
        "  python src/train.py trainer.max_steps=60 loader=auto",
        "val/ndcg_at_10 0.07812  test/ndcg_at_10 0.07111 (best weights)  train/loss 0.25",
        "Also found  memory_unused: see the report",
        "  wandb sync 'logs/a b/wandb/offline-run-1'",
    ):
        assert f" {line}" in text
    (tmp_path / "report.html").touch()
    assert f"Report   {tmp_path}/report.html" in shown(starved(), tmp_path)


@pytest.mark.parametrize("width", [20, 40, 80, 160, None])
def test_no_word_is_broken_and_commands_stay_whole(width: int | None) -> None:
    found = starved(*(f"workload.model.a{number}=1" for number in range(9)))
    lines = [line.plain for line in lines_of(found, Path("logs/run"), width)]
    whole = [line.plain for line in lines_of(found, Path("logs/run"), None)]
    assert " ".join(lines).split() == " ".join(whole).split()
    (command,) = (line for line in lines if "src/train.py" in line)
    assert shlex.split(command)[-2:] == ["workload.model.a8=1", "loader=auto"]
    is_command = [("train.py" in line or "sync" in line or len(line.split()) == 1) for line in lines]
    assert all(width is None or len(line) <= width or known for line, known in zip(lines, is_command, strict=True))


def test_the_command_replaces_what_the_change_replaces_and_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = ["loader=baseline", "loader.num_workers=0", "hydra.run.dir=logs/first", "gpu=24gb"]
    typed.append("workload.data.path='a b'")
    record = RunRecord("r", overrides=typed, flags=["--config-dir=my configs"])
    monkeypatch.setattr(sys, "argv", ["src/train.py", *typed])
    command = " ".join(next_command(record, ["loader=auto"]))
    assert shlex.split(command) == [
        *("python", "src/train.py", "--config-dir=my configs", "gpu=24gb", "workload.data.path='a b'", "loader=auto")
    ]
    (one,) = (word for word in next_command(record, ["loader.num_workers=3"]) if "workers" in word)
    assert one == "loader.num_workers=3"
    monkeypatch.setattr(sys, "argv", ["wellfed", "train"])
    assert next_command(RunRecord("r"), ["gpu=auto"]) == ["wellfed", "train", "gpu=auto"]


@pytest.mark.parametrize(
    ("name", "word", "colour"),
    [("healthy", "FED", "green"), ("unknown", "UNKNOWN", "magenta"), ("too_few_steps", "TOO SHORT", "magenta")],
)
def test_a_verdict_has_its_colour(tmp_path: Path, name: str, word: str, colour: str) -> None:
    (first, *_) = lines_of(starved(findings=[Finding(name, "Words.", {}, is_note=True).entry()]), tmp_path)
    assert first.plain == f" {word}  Words."
    assert any(span.style == colour for span in first.spans)


def test_other_programs_are_a_line_below_the_verdict(tmp_path: Path) -> None:
    first, second, *_ = shown(starved(findings=[STARVED, BUSY]), tmp_path).splitlines()
    assert first.startswith(" STARVED")
    assert second == " Other programs took 1.0 of 2 cores. Wait."
    assert "Also found" not in shown(starved(findings=[STARVED, BUSY]), tmp_path)


def test_a_cause_without_overrides_has_its_advice(tmp_path: Path) -> None:
    advice = "Make it cheaper: decode less. Store less."
    found = Finding("cpu_bound_loading", "All cores are full.", {}, lost_frac=0.5, advice=advice).entry()
    text = shown(starved(findings=[found]), tmp_path)
    assert " Try: Make it cheaper: decode less. Store less.\n" in text


def test_advice_that_changes_what_is_learned_is_marked_and_a_gain_from_1_is_not_shown(tmp_path: Path) -> None:
    learning: FindingEntry = {**STARVED, "changes_learning": True}
    learning["text"] += " This changes what is learned."
    text = shown(starved(findings=[learning]), tmp_path)
    assert "predicted), which changes what is learned:" in text
    assert text.count("hanges what is learned") == 1
    unsure = Finding("too_few_workers", "Words.", {}, ("loader.num_workers=3",), gain=Gain(1.14, 1.0, 2.0)).entry()
    text = shown(starved(findings=[unsure]), tmp_path)
    assert "Try (gain uncertain):" in text
    assert "1.14" not in text


def test_an_interval_from_0_is_not_shown(tmp_path: Path) -> None:
    found = starved()
    assert found.record.throughput is not None
    found.record.throughput["ci95"] = [-100.0, 3000.0]
    assert "1,280 samples/s  20.0 %" in shown(found, tmp_path)


@pytest.mark.parametrize(("status", "word"), [("failed", "FAILED"), ("oom", "OUT OF MEMORY")])
def test_the_last_lines_of_a_failed_run_are_its_error(tmp_path: Path, status: str, word: str) -> None:
    full = Finding("device_memory_full", "Memory was full.", {}, ("memory.micro_batch=4",), lost_frac=1.0).entry()
    text = shown(starved(status=status, ended_by=None, error=ERROR, findings=[full, NOTE]), tmp_path)
    assert f" {word}  100 steps in " in text
    assert text.endswith("\n   disk: No space left\n   Free space.")
    assert "memory.micro_batch=4" in text
    assert "samples/s" not in text
    assert "STARVED" not in shown(starved(status=status, error=ERROR), tmp_path)
    copies = Finding("data_parallel", "One process drives 4 GPUs.", {}, ("x=1",), gain=Gain(2.5, 1.0, 4.0)).entry()
    assert "One process" not in shown(starved(status=status, error=ERROR, findings=[copies]), tmp_path)


def test_an_interrupted_run_says_so_first_and_keeps_its_verdict(tmp_path: Path) -> None:
    first, second, *_ = lines_of(starved(status="interrupted", ended_by=None), tmp_path)
    assert first.plain.startswith(" INTERRUPTED  100 steps in ")
    assert second.plain.startswith(" STARVED")


def test_what_happened_meanwhile_is_on_the_screen(tmp_path: Path) -> None:
    events = [
        {"kind": "checkpoint", "step": 1, "time_s": 1.0, "file": "last.ckpt"},
        {"kind": "gpu_lost", "step": 2, "time_s": 2.0, "gpu": 1},
        {"kind": "disk_full", "step": 3, "time_s": 3.0, "message": "[Errno 28] No space left on device " + "x " * 99},
        *({"kind": "nan", "step": step, "time_s": 4.0} for step in (7, 8)),
        {"kind": "signal", "step": 9, "time_s": 5.0, "message": "stopped by SIGINT"},
    ]
    text = shown(starved(events=events), tmp_path)
    assert " Happened  gpu lost at step 2; disk full at step 3; nan at step 7, the first of 2\n" in text
    assert "last.ckpt" not in text
    assert "ignal" not in text  # the first line says how the run ended


def test_a_record_with_nothing_in_it_has_no_verdict(tmp_path: Path) -> None:
    lines = shown(Evidence(RunRecord("r", status="failed")), tmp_path).splitlines()
    assert [line.split("  ")[0].strip() for line in lines] == ["FAILED", "NO VERDICT", "Folder"]


def test_a_simulated_card_and_a_metric_that_is_not_finite_are_said(tmp_path: Path) -> None:
    gpu = {"index": 0, "name": "G", "is_simulated": True}
    metrics = {"val/loss": None, "train/loss": float("nan")}
    text = shown(starved(machine={"gpus": [gpu]}, metrics=metrics, wandb=None), tmp_path)
    assert "Simulated: G." in text
    assert "val/loss not finite  train/loss not finite" in text


def test_losses_have_their_first_value_and_texts_no_control_characters(tmp_path: Path) -> None:
    found = evidence(metrics={"train/loss": 0.25, "val/\x1b[31m": 1.0})
    found = Evidence(found.record, metrics={("train", "loss"): ([1, 2], [0.75, 0.25])})  # type: ignore[dict-item]
    text = shown(found, tmp_path)
    assert "train/loss 0.25 (first 0.75)" in text
    assert "val/\\x1b[31m 1" in text


def test_several_cards_have_a_range_and_a_doubtful_ceiling_is_marked(tmp_path: Path) -> None:
    gpus = {name: {"util_pct": {"mean": mean}, "power_w": {"mean": 100.0}} for name, mean in {"0": 90, "1": 60}.items()}
    text = shown(evidence(copy_ms=0.0, ceiling=3.0, gpus=gpus), tmp_path)
    assert " 2 GPUs 60-90 %  200 W" in text
    assert "33.3 % of" in text
    assert "(doubtful)" in text
