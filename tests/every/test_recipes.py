"""Pages that show a user's own files, recipes and the tutorial are followed to the letter, in a copy of the project.

Blocks with a path are written, other ``bash`` and ``python`` is run, ``text`` and ``dockerfile`` are only shown.
Each page has a function that checks what it promises.
"""

import csv
import importlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.every.test_readme import ROOT, Block, blocks, project, run
from wellfed.sample_rng import SampleRng

__all__ = ["project"]
FOLDER = ROOT / "docs" / "recipes"
SHOWN = ("text", "dockerfile")
NOTEBOOK = "notebook"
"""Page whose blocks are the cells of one notebook."""
BROUGHT = {"timm": "timm", "torchvision": "torchvision", "onnx": "onnxscript"}
"""Name in a block -> package that it needs, which may be absent, or be no match for the torch that is installed."""


def blocks_of(name: str) -> list[Block]:
    return blocks((FOLDER / f"{name}.md").read_text(encoding="utf-8"))


def lacks(block: Block) -> bool:
    """Whether a block needs a package that can't be imported here."""
    for name, package in BROUGHT.items():
        if name in block.text:
            try:
                importlib.import_module(package)
            except (ImportError, RuntimeError):
                return True
    return False


def write(block: Block, project: Path) -> None:
    """Writes a file of a page into the copy."""
    file = project / block.path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(block.text, encoding="utf-8")


def follow(found: list[Block], project: Path) -> list[str]:
    """Writes the files and runs the other blocks, in their order. Returns what each block has printed."""
    printed = []
    for block in found:
        if block.path:
            write(block, project)
        elif block.language not in SHOWN and not lacks(block):
            command = block.text
            if block.language == "python":
                (project / "typed.py").write_text(block.text, encoding="utf-8")
                command = "python typed.py"
            done = run(command, project, timeout_s=900)
            assert done.returncode == 0, f"{block.text}\n{done.stdout}\n{done.stderr}"
            printed.append(done.stdout + done.stderr)
    return printed


def records(project: Path) -> dict[str, dict[str, Any]]:
    """The records of all runs, by the name of their folder."""
    return {path.parent.name: json.loads(path.read_text()) for path in project.glob("logs/*/runs/*/run.json")}


def checkpoint(folder: Path, name: str = "last") -> dict[str, Any]:
    found: dict[str, Any] = torch.load(folder / "checkpoints" / f"{name}.ckpt", weights_only=True)
    return found


def frozen_layers_stay(project: Path, printed: list[str]) -> None:
    runs = project / "logs/mine/runs"

    def has_changed(run: str, layer: str) -> bool:
        earlier, later = (checkpoint(runs / run, name)["state_dict"] for name in ("last-1", "last"))
        return not torch.equal(earlier[f"model.{layer}.weight"], later[f"model.{layer}.weight"])

    assert has_changed("frozen", "head")
    assert not has_changed("frozen", "body.0")
    assert has_changed("unfrozen", "body.0")


def encoder_joins_later(project: Path, printed: list[str]) -> None:
    folder = project / "logs/recsys/runs/encoder"
    first, last = (checkpoint(folder, name) for name in ("last-1", "last"))
    names = [name for name in first["state_dict"] if ".encoder." in name and "weight" in name]
    assert names
    assert all(not torch.equal(first["state_dict"][name], last["state_dict"][name]) for name in names)
    before, after = (
        {float(weight["step"]) for weight in each["optimizer_states"][0]["state"].values()} for each in (first, last)
    )
    (steps,) = before
    assert after == {steps}  # the optimizer began anew
    record = records(project)["encoder"]
    assert (record["steps"], record["plan"]["memory.features"]["value"]) == (2 * steps, "dynamic")


def rare_classes_are_found(project: Path, printed: list[str]) -> None:
    (record,) = records(project).values()
    assert record["plan"]["memory.accumulate"]["value"] == 4
    assert record["metrics"]["test/predicted_rare"] > 0.2  # of which a tenth is rare; unweighted, next to none


def both_optimizers_step(project: Path, printed: list[str]) -> None:
    state = checkpoint(project / "logs/mine/runs/both")["optimizer_states"][0]
    assert [group["lr"] for group in state["param_groups"]] == [0.01, 0.001]
    assert {frozenset(of_weight) for of_weight in state["state"].values()} == {
        frozenset({"momentum_buffer"}),
        frozenset({"step", "exp_avg", "exp_avg_sq"}),
    }
    assert records(project)["both"]["steps"] == 100


def both_networks_learn(project: Path, printed: list[str]) -> None:
    (path,) = project.glob("logs/gan/runs/*")
    earlier, later = (checkpoint(path, name)["state_dict"] for name in ("last-1", "last"))
    assert len(earlier) == 8
    assert not any(torch.equal(earlier[name], later[name]) for name in earlier)
    assert len(checkpoint(path)["optimizer_states"]) == 2


def goes_on_elsewhere(project: Path, printed: list[str]) -> None:
    there = json.loads((project.parent / "other_disk/first/run.json").read_text())
    assert (there["status"], there["steps"]) == ("ok", 100)
    assert "other_disk" in there["resumed_from"]
    assert records(project)["first"]["steps"] == 50


def two_of_four_are_listed(project: Path, printed: list[str]) -> None:
    (shown,) = printed
    assert re.findall(r"gpu (\d) ", shown) == ["0", "1"]
    assert re.findall(r"GPU-aaaa1111-0000-0000-0000-\d+(\d)", shown) == ["2", "4"]


def pairs_are_mixed(project: Path, printed: list[str]) -> None:
    """Labels are shares, the same however a batch is cut."""
    (record,) = records(project).values()
    assert record["metrics"]["test/accuracy"] > 0.7
    space: dict[str, Any] = {}
    exec((project / "src/workloads/mine/data.py").read_text(), space)
    splits = space["datasets"](count=500)
    whole = splits.train.fetch(torch.arange(40), SampleRng(1, 0, 0))
    part = splits.train.fetch(torch.arange(10, 20), SampleRng(1, 0, 7))
    assert all(torch.equal(whole[name][10:20], part[name]) for name in whole)
    assert whole["labels"].sum(1) == pytest.approx(torch.ones(40))
    assert whole["labels"].max(1).values.mean() < 0.95


def pictures_are_learned(project: Path, printed: list[str]) -> None:
    (record,) = records(project).values()
    assert record["metrics"]["test/loss"] < 0.9  # guessing gives ln 3


def any_net_is_trained(project: Path, printed: list[str]) -> None:
    assert all("test/loss" in record["metrics"] for record in records(project).values())


def predictions_are_of_the_test_split(project: Path, printed: list[str]) -> None:
    with (project / "predictions.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    evaluated = json.loads((project / "logs/mine/runs/first/evaluation.json").read_text())["metrics"]
    assert len(rows) == 1000
    assert [int(row["sample"]) for row in rows] == list(range(1000))
    assert float(rows[0]["probability"]) <= 1
    assert evaluated["test/accuracy"] == pytest.approx(records(project)["first"]["metrics"]["test/accuracy"], abs=1e-6)


def files_are_exported(project: Path, printed: list[str]) -> None:
    assert (project / "mine.pt2").stat().st_size > 0
    assert (project / "mine.ts").stat().st_size > 0


def pictures_are_logged(project: Path, printed: list[str]) -> None:
    first = project / "logs/mine/runs/first"
    pictures = list(first.glob("wandb/offline-run-*/files/media/images/confusion_picture*.png"))
    tables = list(first.glob("wandb/offline-run-*/files/media/table/confusion*.json"))
    assert len(pictures) == len(tables) == 3  # two validations and the test, none of the batches that are only tried
    assert list(project.glob("logs/mine/runs/second/wandb/offline-run-*/files/media/images/weights*.png"))


def tags_reach_wandb(project: Path, printed: list[str]) -> None:
    files = sorted(project.glob("logs/recsys/runs/*/wandb/offline-run-*/run-*.wandb"))
    sent = [path.read_bytes() for path in sorted(files, key=lambda path: path.stat().st_mtime)]
    for words, sending in zip(
        [(b"first_try", b"baseline", b"ablation", b"shop"), (b"paper", b"ablation")], sent, strict=True
    ):
        assert all(word in sending for word in words)


def nothing_more(project: Path, printed: list[str]) -> None:
    """Pages without commands to run."""
    assert printed == []


PROMISES: dict[str, Callable[[Path, list[str]], None]] = {
    "class_weights": rare_classes_are_found,
    "containers": nothing_more,
    "export": files_are_exported,
    "freeze_layers": frozen_layers_stay,
    "gan": both_networks_learn,
    "image_folder": pictures_are_learned,
    "log_images": pictures_are_logged,
    "macos_and_windows": nothing_more,
    "mixup": pairs_are_mixed,
    "predictions": predictions_are_of_the_test_split,
    "resume_on_another_machine": goes_on_elsewhere,
    "train_encoder_later": encoder_joins_later,
    "some_of_the_gpus": two_of_four_are_listed,
    "timm": any_net_is_trained,
    "two_optimizers": both_optimizers_step,
    "wandb_tags": tags_reach_wandb,
}
"""Page -> what must hold once it was followed."""


@pytest.mark.slow
@pytest.mark.parametrize("page", ["hugging_face", "inference", "lightning", "migrate"])
def test_a_page_is_followed_to_the_letter(page: str, project: Path) -> None:
    found = blocks((ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8"))
    follow(found, project)
    records = [json.loads(path.read_text()) for path in project.glob("logs/**/run.json")]
    runs = sum(block.text.count("src/train.py") for block in found if not block.path)
    assert [record["status"] for record in records] == ["ok"] * runs
    assert all({"val/loss", "test/loss"} < set(record["metrics"]) for record in records)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROMISES)
def test_a_recipe_is_followed_to_the_letter(name: str, project: Path) -> None:
    printed = follow(blocks_of(name), project)
    assert {record["status"] for record in records(project).values()} <= {"ok"}
    PROMISES[name](project, printed)


@pytest.mark.slow
@pytest.mark.guests
def test_the_notebook_is_run_cell_by_cell(project: Path) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    cells = [block.text for block in blocks_of(NOTEBOOK)]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in cells])
    nbformat.write(notebook, project / "mine.ipynb")
    command = (
        "import nbformat, nbclient; nbclient.NotebookClient(nbformat.read('mine.ipynb', 4), timeout=200).execute()"
    )
    done = run(f'python -c "{command}"', project)
    assert done.returncode == 0, done.stderr
    assert nbclient
    assert records(project)["first"]["status"] == "ok"


@pytest.mark.slow
def test_the_tutorial_feeds_its_run(project: Path) -> None:
    """The override that the page types is the one that the run names, with its own number of workers."""
    *found, _ = (block for block in blocks((ROOT / "docs" / "tutorial.md").read_text()) if block.language != "text")
    *printed, tuned = follow(found, project)
    runs = records(project)
    starved, fed = runs["starved"], runs["fed"]
    (cause,) = [finding for finding in starved["findings"] if finding["id"] == "loading_in_main_process"]
    named = dict(text.split("=") for text in cause["change"])
    typed = dict(text.split("=") for text in fed["overrides"] if text not in starved["overrides"])
    assert set(named) == set(typed) - {"hydra.run.dir"}
    assert int(named["loader.num_workers"]) > 3
    assert fed["throughput"]["samples_per_s"] > 2 * starved["throughput"]["samples_per_s"]
    assert fed["metrics"]["test/loss"] == pytest.approx(starved["metrics"]["test/loss"], rel=1e-4)
    assert any(text.startswith("A: starved (photos)") for text in printed)
    assert (project / "logs/comparison_starved_fed.html").is_file()
    assert "beyond noise." in tuned or "the start stays." in tuned  # the latter on a busy machine
