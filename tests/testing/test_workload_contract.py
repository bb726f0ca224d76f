"""The contract of workloads, run by pytest in a small project: sound workloads pass and broken ones fail."""

import os
import re
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch

from tests.end_to_end.commands import Done, run
from wellfed.testing import WorkloadContract
from wellfed.testing.made_workload import differences

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "workloads.md").read_text(encoding="utf-8")
SHOWN = dict(re.findall(r"^```python (tests/\S+)\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL))
CONFTEST, TESTS = SHOWN["tests/conftest.py"], SHOWN["tests/test_workloads.py"]
PYPROJECT = (
    '[tool.pytest.ini_options]\naddopts = "--strict-markers"\nfilterwarnings = ["error"]\ntestpaths = ["tests"]\n'
)
BROKEN = '''"""Workloads with one mistake each."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import IterableDataset

from wellfed import DataError, Datasets, LossOutput


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, inputs):
        return self.layer(inputs)

    def loss(self, batch):
        return LossOutput(cross_entropy(self(batch["inputs"]), batch["labels"]))


class VectorLoss(Network):
    def loss(self, batch):
        return LossOutput(cross_entropy(self(batch["inputs"]), batch["labels"], reduction="none"))


class SumLoss(Network):
    def loss(self, batch):
        return cross_entropy(self(batch["inputs"]), batch["labels"], reduction="sum")


class HalfFrozen(Network):
    def __init__(self):
        super().__init__()
        self.others = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def param_groups(self):
        return [{"params": list(self.layer.parameters())}]

    def forward(self, inputs):
        return nn.Sequential(self.layer, *self.others)(inputs)


class Points:
    def __init__(self, num_points=64):
        generator = torch.Generator().manual_seed(0)
        self.labels = torch.arange(num_points) % 4
        self.inputs = torch.randn(num_points, 8, generator=generator) + self.labels[:, None]

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {"index": torch.tensor(index), "inputs": self.inputs[index], "labels": self.labels[index]}


class Batches(Points):
    def fetch(self, indices, rng):
        return {"index": indices, "inputs": self.inputs[indices], "labels": self.labels[indices]}


class OtherFetch(Batches):
    def fetch(self, indices, rng):
        return {**super().fetch(indices, rng), "labels": self.labels[(indices + 1) % len(self)]}


class TorchRandom(Batches):
    def fetch(self, indices, rng):
        batch = super().fetch(indices, rng)
        return {**batch, "inputs": batch["inputs"] + torch.rand(len(indices), 1)}


class DrawsInSequence(Batches):
    def on_device(self, batch, rng):
        noise = torch.rand(len(batch["inputs"]), 1, generator=rng)
        return {**batch, "inputs": batch["inputs"] + noise}


class DrawsByIndex(Batches):
    def on_device(self, batch, rng):
        return {**batch, "inputs": batch["inputs"] + rng.uniform_at(batch["index"])[:, None]}


class HoldsLambda(Batches):
    def __init__(self):
        super().__init__()
        self.scale = lambda value: value


class Stream(IterableDataset):
    def __iter__(self):
        points = Points()
        return (points[index] for index in range(64))


class Accuracy:
    best_metric = "accuracy"
    best_mode = "max"

    def reset(self):
        self.right, self.seen = 0, 0

    def update(self, model, batch, *features):
        self.right += int((model(batch["inputs"]).argmax(1) == batch["labels"]).sum())
        self.seen += len(batch["labels"])

    def compute(self):
        return {"accuracy": self.right / self.seen}

    def artifacts(self, folder):
        return {}


class MeanOfMeans(Accuracy):
    def update(self, model, batch, *features):
        inputs = batch["inputs"]
        self.right += float((inputs - inputs.mean(0)).square().mean())
        self.seen += 1


def datasets(train="Batches", evaluation="Accuracy"):
    kinds = globals()
    return Datasets(kinds[train](), Batches(16), Batches(16), evaluation=kinds[evaluation]())


def missing():
    raise DataError("photos: there is no such folder. Set workload.data.path.")
'''
CASES = {
    "lossy": (
        "VectorLoss",
        "",
        "test_a_step_trains_it",
        "VectorLoss.loss: the loss has shape [8], and must be one num",
    ),
    "summed": (
        "SumLoss",
        "",
        "test_the_loss_of_a_batch_is_the_mean_of_its_parts",
        r"SumLoss.loss: the loss of a batch of 8 is .*, but the mean over its parts of 3 and 5 samples .*not a sum",
    ),
    "left_out": (
        "HalfFrozen",
        "",
        "test_a_step_trains_it",
        r"two steps leave 6 of 8 parameters as they were, among them others.0.weight, .*param_groups\(\)",
    ),
    "other_fetch": (
        "Network",
        "train: OtherFetch",
        "test_fetch_gives_what_getitem_gives",
        r"OtherFetch.fetch\(indices, rng\) gives another batch than OtherFetch.__getitem__ and collating: "
        r"batch\['labels'\] differs in 8 of 8 values",
    ),
    "torch_random": (
        "Network",
        "train: TorchRandom",
        "test_a_batch_is_the_same_again",
        r"TorchRandom: the first batch, built twice, is not the same: batch\['inputs'\] differs .*from the rng",
    ),
    "in_sequence": (
        "Network",
        "train: DrawsInSequence",
        "test_a_batch_is_the_same_however_it_is_cut",
        r"DrawsInSequence: batch\['inputs'\] is not the same when on_device gets the batch in parts .*uniform",
    ),
    "with_lambda": (
        "Network",
        "train: HoldsLambda",
        "test_its_data_can_be_sent_to_a_process",
        "train can't be sent to worker processes: HoldsLambda: .*instead of a lambda",
    ),
    "mean_of_means": (
        "Network",
        "evaluation: MeanOfMeans",
        "test_its_evaluation_is_additive",
        r"MeanOfMeans.compute\(\) is \{'accuracy': .*\} for whole batches and .* in two parts. Keep sums and counts",
    ),
}
"""Workload -> its model, an argument of its data, the promise that it breaks, and what its author is told."""
ALSO = {
    "lossy": ("test_the_loss_of_a_batch_is_the_mean_of_its_parts",),
    "torch_random": ("test_its_data_can_be_sent_to_a_process", "test_fetch_gives_what_getitem_gives"),
}
"""More promises that such a mistake may break."""
SOUND = {"blank", "by_index", "plain", "stream"}


SLOW = {"test_it_trains_and_is_evaluated"}
LEFT_OUT = "test_a_batch_is_the_same_however_it_is_cut"
EXPERIMENTS = "test_every_experiment_composes"
OF_WORKLOADS = {name for name in vars(WorkloadContract) if name.startswith("test_")} - {EXPERIMENTS}


def option(name: str, model: str = "mine.broken.Network", data: str = "mine.broken.datasets", more: str = "") -> str:
    return (
        f"name: {name}\neffective_batch_size: 16\nmodel:\n  _target_: {model}\ndata:\n  _target_: {data}\n"
        f"{f'  {more}' if more else ''}\noptimizer:\n  _target_: torch.optim.AdamW\n  lr: 0.01\n"
    )


def make_project(folder: Path, options: dict[str, str]) -> Path:
    """A project with these workloads, the first of them the default, beside the engine and not around it."""
    project = folder / "my nets ü"
    left_out = shutil.ignore_patterns("workload", "experiment")
    shutil.copytree(ROOT / "configs", project / "configs", ignore=left_out)
    train = project / "configs" / "train.yaml"
    train.write_text(train.read_text().replace("workload: recsys", f"workload: {next(iter(options))}"))
    (project / "src" / "mine").mkdir(parents=True)
    shutil.copy(ROOT / "src" / "train.py", project / "src")
    (project / "src" / "mine" / "broken.py").write_text(BROKEN)
    for file in ("model.py", "data.py"):
        shutil.copy(ROOT / "src" / "wellfed" / "cli" / "blank" / file, project / "src" / "mine")
    (project / "configs" / "workload").mkdir()
    for name, text in options.items():
        (project / "configs" / "workload" / f"{name}.yaml").write_text(text)
    (project / "tests").mkdir()
    (project / "tests" / "conftest.py").write_text(CONFTEST)
    (project / "tests" / "test_workloads.py").write_text(TESTS)
    (project / "pyproject.toml").write_text(PYPROJECT)
    return project


PYTEST = """
import os, sys
import pytest

sys.dont_write_bytecode = True
os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # some are imported already, and can't be rewritten
sys.exit(pytest.main())
"""


def run_pytest(project: Path, *words: str, cwd: Path | None = None) -> Done:
    script = project.parent / "run_pytest.py"
    script.write_text(PYTEST)
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(("PYTEST_", "WELLFED_"))]:
            patch.delenv(name)
        given = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist", *words)
        return run(script, *given, cwd=cwd or project, PYTHONPATH=str(ROOT / "src"))


def files(project: Path) -> set[str]:
    """All files but the bytecode that Python keeps."""
    return {path.relative_to(project).as_posix() for path in project.rglob("*") if "__pycache__" not in path.parts}


BLANK = (ROOT / "src" / "wellfed" / "cli" / "blank" / "workload.yaml").read_text().replace("wellfed.cli.blank", "mine")
OPTIONS = {
    "blank": BLANK,
    "plain": option("plain", more="train: Points"),
    "by_index": option("by_index", more="train: DrawsByIndex"),
    "stream": option("stream", more="train: Stream"),
    **{name: option(name, f"mine.broken.{model}", more=more) for name, (model, more, _, _) in CASES.items()},
    "no_data": option("no_data", data="mine.broken.missing"),
    "renamed": option("another"),
    "typo": option("typo").replace("lr: 0.01", "learning_rate: 0.01"),
}


def outcomes(folder: Path) -> dict[str, dict[str, str]]:
    """Workload -> test -> message of its failure, empty where it passed or was skipped; of one run of pytest."""
    project = make_project(folder, OPTIONS)
    before = files(project)
    done = run_pytest(project, "-m", "not slow", f"--junitxml={folder}/found.xml")
    assert done.code == 1, done.text
    assert files(project) == before
    found: dict[str, dict[str, str]] = {}
    for case in ET.parse(folder / "found.xml").iter("testcase"):
        test, _, workload = case.get("name", "").rstrip("]").partition("[")
        faults = [entry.get("message", "") for entry in case if entry.tag in ("failure", "error")]
        found.setdefault(workload, {})[test] = " ".join(faults)
    return found


def failed(of_workload: dict[str, str]) -> set[str]:
    return {test for test, message in of_workload.items() if message}


@pytest.mark.slow
def test_sound_workloads_pass_and_broken_ones_are_told_why(tmp_path: Path):
    """In one run of pytest: starting Python and torch takes longer than the tests."""
    found = outcomes(tmp_path)
    for workload in SOUND:
        assert failed(found[workload]) == set(), (workload, found[workload])
        assert set(found[workload]) == OF_WORKLOADS - SLOW
    for workload, (_, _, promise, words) in CASES.items():
        message = found[workload][promise]
        assert message.startswith(f"Failed: workload={workload}: ")
        assert re.search(words, message) or words in message, message
        assert failed(found[workload]) <= {promise, *ALSO.get(workload, ())}, (workload, found[workload])
    assert "photos: there is no such folder. Set workload.data.path." in found["no_data"]["test_a_step_trains_it"]
    assert "learning_rate" in found["typo"]["test_a_step_trains_it"]
    message = found["renamed"]["test_its_name_is_that_of_its_file"]
    assert "configs/workload/renamed.yaml has name: another. Write name: renamed, or rename the file." in message


@pytest.mark.slow  # it trains
def test_all_of_it_from_another_folder_leaves_nothing_in_the_project(tmp_path: Path):
    project = make_project(tmp_path, {"blank": BLANK})
    (project / "configs" / "experiment").mkdir()
    (project / "configs" / "experiment" / "wide.yaml").write_text(
        "# @package _global_\nworkload:\n  model:\n    hidden: 128\n"
    )
    before = files(project)
    done = run_pytest(project, str(project / "tests"), "-rA", cwd=tmp_path)
    assert done.code == 0, done.text
    assert "test_it_trains_and_is_evaluated[blank]" in done.out
    assert "test_every_experiment_composes[wide]" in done.out
    assert files(project) == before


@pytest.mark.slow
def test_without_the_plugin_the_line_to_write_is_told(tmp_path: Path):
    project = make_project(tmp_path, {"blank": BLANK})
    (project / "tests" / "conftest.py").unlink()
    done = run_pytest(project, "--collect-only")
    assert done.code == 2, done.text
    assert 'pytest_plugins = ["wellfed.testing"] in tests/conftest.py' in done.out


@pytest.mark.slow
def test_the_example_of_the_page_collects_what_it_chooses(tmp_path: Path):
    project = make_project(tmp_path, {"blank": BLANK, "mine": BLANK.replace("name: blank", "name: mine")})
    (project / "tests" / "test_workloads.py").unlink()
    (project / "tests" / "test_mine.py").write_text(SHOWN["tests/test_mine.py"])
    done = run_pytest(project, "--collect-only", "-m", "not slow")
    found = set(re.findall(r"::(test_\w+)\[(\w+)\]", done.out))
    own = {(test, "mine") for test in OF_WORKLOADS - SLOW - {LEFT_OUT}}
    assert found == own | {(EXPERIMENTS, "None")}, done.text


def test_the_page_names_every_test():
    rows = PAGE.partition("| test | fails if |")[2].partition("\n\n")[0]
    assert sorted(re.findall(r"`(test_\w+)`", rows)) == sorted(OF_WORKLOADS | {EXPERIMENTS})


@pytest.mark.slow
def test_a_project_without_workloads_is_told(tmp_path: Path):
    project = make_project(tmp_path, {"blank": BLANK})
    (project / "configs" / "workload" / "blank.yaml").unlink()
    done = run_pytest(project, "--collect-only")
    assert done.code == 2
    assert "has no workload. Write one: python -m wellfed add workload NAME." in " ".join(done.out.split())


def test_differences_are_named():
    one = {"a": torch.tensor([1.0, float("nan")]), "b": (torch.arange(3), torch.tensor([True]))}
    assert differences(one, {"a": one["a"].clone(), "b": one["b"]}) == ""
    assert differences(one, {**one, "a": torch.tensor([1.5, float("nan")])}, 0.1) == "batch['a'] differs by up to 0.5"
    assert differences(one, {**one, "a": torch.tensor([1.05, float("nan")])}, 0.1) == ""
    assert differences(one, {**one, "b": (torch.arange(3) * 2, torch.tensor([False]))}) == (
        "batch['b'][0] differs in 2 of 3 values; batch['b'][1] differs in 1 of 1 values"
    )
    assert differences(one, {**one, "a": torch.zeros(3)}) == "batch['a'] is [2] float32 and [3] float32"
    assert differences(one, {"a": one["a"]}) == "they hold batch['a'], batch['b'][0], batch['b'][1] and batch['a']"
