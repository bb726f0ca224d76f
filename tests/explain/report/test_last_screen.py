"""The last screen of a run: its verdict first, some ten lines, and a command that can be typed as it is."""

import gzip
import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.text import Text

from tests.kit.evidence_of import evidence
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import Finding, Gain
from wellfed.explain.diagnosis.run_rules import conclude
from wellfed.explain.report.last_screen import MOST_LINES, Screen, last_lines, next_command
from wellfed.record import FindingEntry, RunRecord

TRACES = Path(__file__).parents[2] / "traces"
STARVED = Finding(
    "loading_in_main_process",
    "80 % of each step waits for data: the training process builds a batch itself. " + "The data has fetch. " * 9,
    {},
    ("loader=auto",),
    gain=Gain(4.0, 2.9, 4.4),
).entry()
NOTE = Finding("memory_unused", "Words.", {}, is_note=True).entry()


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


def lines_of(found: Evidence, folder: Path, width: int | None = 80, *, is_utf: bool = True) -> list[Text]:
    return list(last_lines(found, folder, Screen(width, is_utf=is_utf)))


def shown(found: Evidence, folder: Path, width: int | None = 80) -> str:
    return "\n".join(line.plain for line in lines_of(found, folder, width))


@pytest.fixture(autouse=True)
def script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["src/train.py", "trainer.max_steps=60"])


def test_a_starved_run_has_its_verdict_and_the_next_command(tmp_path: Path) -> None:
    (tmp_path / "report.html").touch()
    first, *rest = lines_of(starved(), Path("logs/run"))
    assert first.plain == " STARVED  80 % of each step waits for data: the training process builds a batch"
    assert first.style == "red"
    text = "\n".join(line.plain for line in rest)
    assert " 1,280 samples/s (1,254-1,306)  20.0 % of 6,400 possible  batches ready 0 %\n" in text
    bars = "\u2588" * 13
    assert f" wait {bars} 80 %  compute \u2588\u2588\u2588 18 %  copy 1 %  host 1 %  100 ms a step\n" in text
    assert " GPU 3 %  memory 0.50 of 21.6 GiB  69 W  CPU 0.2 of 8 cores\n" in text
    assert " Try (about 4.0 times as fast (2.9 to 4.4), predicted):\n" in text
    assert "   python src/train.py trainer.max_steps=60 loader=auto\n" in text
    assert " val/ndcg_at_10 0.07812  test/ndcg_at_10 0.07111 (best weights)  train/loss 0.25\n" in text
    assert "   wandb sync 'logs/a b/wandb'/offline-run-*" in text
    assert "ok:" not in text
    assert len(rest) + 1 <= MOST_LINES
    assert f"Report   {tmp_path}/report.html" in shown(starved(), tmp_path)


def test_the_file_of_a_pipe_has_one_line_each(tmp_path: Path) -> None:
    long = [f"workload.model.a{number}=1" for number in range(20)]
    text = shown(starved(*long), tmp_path, None)
    assert f"\n   python src/train.py {' '.join(long)} loader=auto\n" in text


@pytest.mark.parametrize("width", [20, 40, 80, 160])
def test_no_word_is_broken_at_any_width(width: int) -> None:
    wandb = {"id": "1", "mode": "offline", "path": "", "parts": ["logs/run/wandb/offline-run-20261126_063011-iuyvw7fy"]}
    found = starved(*(f"workload.model.a{number}=1" for number in range(9)), wandb=wandb)
    whole = shown(found, Path("logs/run"), None).split()
    lines = lines_of(found, Path("logs/run"), width)
    words = [word for line in lines for word in line.plain.split() if word != "\\" and "\u2588" not in word]
    left = iter(whole)
    assert all(word in left for word in words)  # in this order, some left out
    assert width >= 60 or words == [word for word in whole if "\u2588" not in word]
    too_long = [line.plain for line in lines if len(line.plain) > width]
    assert all(len(line.removesuffix("\\").split()) == 1 for line in too_long), too_long


def test_a_terminal_without_utf_8_gets_ascii(tmp_path: Path) -> None:
    assert all(line.plain.isascii() for line in lines_of(starved(), tmp_path, is_utf=False))


def test_the_command_replaces_what_the_change_replaces_and_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = [
        "loader=baseline",
        "loader.num_workers=0",
        "hydra.run.dir=logs/first",
        "gpu=24gb",
        "workload.data.path='a b'",
    ]
    record = RunRecord("r", overrides=typed)
    monkeypatch.setattr(sys, "argv", ["src/train.py", "--plan", "--config-dir", "my configs", *typed])
    command = " ".join(next_command(record, ["loader=auto"]))
    assert shlex.split(command) == [
        *("python", "src/train.py", "--config-dir", "my configs", "gpu=24gb", "workload.data.path='a b'", "loader=auto")
    ]
    (one,) = (word for word in next_command(record, ["loader.num_workers=3"]) if "workers" in word)
    assert one == "loader.num_workers=3"
    monkeypatch.setattr(sys, "argv", ["wellfed", "train", "--config-dir=x"])
    assert next_command(RunRecord("r"), ["gpu=auto"]) == ["wellfed", "train", "--config-dir=x", "gpu=auto"]


@pytest.mark.parametrize(
    ("name", "word", "colour"),
    [
        ("healthy", "HEALTHY", "green"),
        ("unknown", "UNKNOWN", "magenta"),
        ("busy_machine", "NOT TO BE JUDGED", "yellow"),
    ],
)
def test_a_verdict_has_its_colour(tmp_path: Path, name: str, word: str, colour: str) -> None:
    told = Finding(name, "Words.", {}, is_note=name != "busy_machine", lost_frac=0.2).entry()
    (first, *_) = lines_of(starved(findings=[told]), tmp_path)
    assert (first.plain, first.style) == (f" {word}  Words.", colour)


def test_other_programs_do_not_hide_a_starved_run(tmp_path: Path) -> None:
    busy = Finding("busy_machine", "Don't judge this run: other programs took 1 core.", {}, lost_frac=0.5).entry()
    one, other, *_ = lines_of(starved(findings=[busy, STARVED]), tmp_path)
    assert one.plain == " NOT TO BE JUDGED  other programs took 1 core."
    assert other.plain.startswith(" STARVED  80 %")
    assert "loader=auto" in shown(starved(findings=[busy, STARVED]), tmp_path)


def test_advice_that_changes_what_is_learned_is_marked(tmp_path: Path) -> None:
    learning: FindingEntry = {**STARVED, "changes_learning": True}
    assert "predicted), which changes what is learned:" in shown(starved(findings=[learning]), tmp_path, None)


@pytest.mark.parametrize(
    ("status", "word", "colour"),
    [("failed", "FAILED", "red"), ("oom", "OUT OF MEMORY", "red"), ("interrupted", "INTERRUPTED", "yellow")],
)
def test_a_run_that_did_not_end_well_says_so_first(tmp_path: Path, status: str, word: str, colour: str) -> None:
    error = {"kind": "disk", "message": "No space left", "advice": "Free space."}
    ended = starved(status=status, ended_by=None, error=None if status == "interrupted" else error)
    lines = lines_of(ended, tmp_path)
    assert lines[0].style == colour
    assert lines[0].plain.startswith(f" {word}  100 steps in ")
    assert ("the error is above" in lines[0].plain) is (status != "interrupted")
    assert lines[1].plain.startswith(" STARVED")
    assert not any("No space left" in line.plain for line in lines)  # on stderr, above


def test_what_happened_meanwhile_is_on_the_screen(tmp_path: Path) -> None:
    events = [
        {"kind": "checkpoint", "step": 1, "time_s": 1.0, "file": "last.ckpt"},
        {"kind": "gpu_lost", "step": 2, "time_s": 2.0, "gpu": 1},
        {"kind": "disk_full", "step": 3, "time_s": 3.0, "message": "[Errno 28] No space left on device " + "x " * 99},
        *({"kind": "nan", "step": step, "time_s": 4.0} for step in (7, 8)),
        {"kind": "oom", "step": 9, "time_s": 5.0},
        {"kind": "signal", "step": 9, "time_s": 5.0, "message": "stopped by SIGINT"},
    ]
    text = shown(starved(events=events), tmp_path, None)
    assert " Happened  gpu lost at step 2; disk full at step 3; nan at step 7, the first of 2; oom at step 9\n" in text
    alone = shown(starved(events=events[:1] + events[2:3]), tmp_path, None)
    told = r" Happened  disk full at step 3: message=\[Errno 28\] No space left on device (x )+\.\.\.\n"
    assert re.search(told, alone)
    assert "last.ckpt" not in text
    assert "ignal" not in text  # the first line says how the run ended


def test_a_record_with_nothing_in_it_has_no_verdict(tmp_path: Path) -> None:
    lines = lines_of(Evidence(RunRecord("r", status="failed")), tmp_path)
    assert [line.plain.split("  ")[0].strip() for line in lines] == ["FAILED", "NO VERDICT", "Folder"]
    assert "no rule found a cause" in shown(starved(findings=[]), tmp_path)


def test_a_simulated_card_and_a_metric_that_is_not_finite_are_said(tmp_path: Path) -> None:
    gpu = {"index": 0, "name": "G", "is_simulated": True}
    text = shown(
        starved(machine={"gpus": [gpu]}, metrics={"val/loss": None, "train/loss": float("nan")}, wandb=None), tmp_path
    )
    assert "Simulated GPU: figures show how wellfed works, not how fast a GPU is." in text
    assert "val/loss not finite  train/loss not finite" in text


def test_losses_have_their_first_value_and_texts_no_control_characters(tmp_path: Path) -> None:
    found = evidence(metrics={"train/loss": 0.25, "val/\x1b[31m": 1.0})
    found = Evidence(found.record, metrics={("train", "loss"): ([1, 2], [0.75, 0.25])})  # type: ignore[dict-item]
    text = shown(found, tmp_path)
    assert "train/loss 0.25 (first 0.75)" in text
    assert "val/\\x1b[31m 1" in text


def test_of_several_cards_the_range_counts_and_of_a_doubtful_ceiling_the_doubt(tmp_path: Path) -> None:
    gpus = {name: {"util_pct": {"mean": mean}, "power_w": {"mean": 100.0}} for name, mean in {"0": 90, "1": 60}.items()}
    found = evidence(copy_ms=0.0, ceiling=3.0, gpus=gpus)
    lines = lines_of(found, tmp_path)
    (cards,) = (line for line in lines if "GPUs" in line.plain)
    assert cards.plain.startswith(" 2 GPUs 60-90 %  200 W")
    assert any(span.style == "yellow" for span in cards.spans)
    assert "33.3 % of" in shown(found, tmp_path)
    assert "(doubtful)" in shown(found, tmp_path)


def test_compute_is_divided_among_its_phases(tmp_path: Path) -> None:
    found = evidence(compute_ms=18.0, host_ms=2.0)
    assert found.record.time is not None
    found.record.time |= {"forward_frac": 0.3, "backward_frac": 0.4, "optimizer_frac": 0.15}
    assert "90 % (forward 30, backward 40, optimizer 15, other 5)  host" in shown(found, tmp_path, None)
    assert "(forward" not in shown(evidence(), tmp_path)


@pytest.mark.parametrize("number", [0, 6, 12, 30])
def test_a_terminal_gets_few_lines_and_a_long_command_whole(tmp_path: Path, number: int) -> None:
    gpu = {"index": 0, "name": "G", "is_simulated": True}
    overrides = [f"workload.model.layers.{place}.width=512" for place in range(number)]
    profile: Any = {"operations": [{"name": "aten::mm", "share_frac": 0.5}]}
    lost = [{"kind": "gpu_lost", "step": 2, "time_s": 2.0, "gpu": 1}]
    found = starved(*overrides, machine={"gpus": [gpu]}, events=lost, profile=profile, artifacts={"a": "a.png"})
    lines = [line.plain for line in lines_of(found, tmp_path)]
    (command,) = re.findall(r"^ Try .*:\n((?:   .*\n)+)", "\n".join(lines), flags=re.MULTILINE)
    assert shlex.split(command.replace("\\\n", " "))[2:] == [*(overrides or ["trainer.max_steps=60"]), "loader=auto"]
    assert len(lines) <= max(MOST_LINES, command.count("\n") + 5)
    assert lines[0].startswith(" STARVED ")
    assert lines[-1].startswith((" Report ", " Folder ", " wandb", "   wandb"))
    wide = [line.plain for line in lines_of(found, tmp_path, None)]
    told = "\n".join(wide)
    assert all(name in told for name in ("Happened", "Profile", "Files", "wandb sync", "Also found", "Simulated"))
    by_rank = ("Happened", "samples/s", "Simulated", "100 ms a step", "val/ndcg", "GPU 3 %")
    kept = [name for name in by_rank if any(name in line for line in lines)]
    assert kept == [*by_rank[: {0: 6, 6: 4, 12: 2, 30: 0}[number]]]


@pytest.mark.parametrize("path", sorted(TRACES.glob("*/*.json.gz"))[::12], ids=lambda path: path.name.split(".")[0])
def test_the_screen_of_a_recorded_run_fits(path: Path, tmp_path: Path) -> None:
    for file, text in json.loads(gzip.decompress(path.read_bytes()))["files"].items():
        (tmp_path / file).write_text(text)
    found = Evidence.read(tmp_path)
    conclude(found)
    lines = [line.plain for line in lines_of(found, Path("logs/recsys/runs/2026-11-26_10-06-13_d9c0"))]
    assert 7 <= len(lines) <= MOST_LINES
    assert max(map(len, lines)) <= 80
