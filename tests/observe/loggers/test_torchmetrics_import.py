"""torchmetrics: two classes of it until something else is used, then all of it, as if it had been imported as usual."""

import json
import subprocess
import sys

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("scipy")
pytest.importorskip("transformers")

SETUP = """
import json, os, sys, threading
from importlib import import_module
import wellfed.observe.loggers.lightning_loggers
import torch, torchmetrics
"""
NAMES = """
homes = {name: getattr(torchmetrics, name).__module__ for name in torchmetrics.__all__ if name != "functional"}
print(json.dumps([sorted(vars(torchmetrics)), homes]))
"""


def told_by(code: str, setup: str = SETUP) -> object:
    """What the last line of a fresh process is, as JSON."""
    done = subprocess.run([sys.executable, "-c", setup + code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_lightning_is_imported_without_what_metrics_alone_need():
    """A user's own metric works, and is drawn, before anything else of torchmetrics is used."""
    found = told_by(
        """
from torchmetrics import Metric, MetricCollection
import lightning.pytorch.core.module as used
heavy = {"scipy", "transformers", "pandas", "sklearn", "matplotlib", "torchmetrics.text"} & set(sys.modules)

class Mine(Metric):
    def __init__(self):
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")
    def update(self, value):
        self.total += value
    def compute(self):
        return self.total

metric = Mine()
metric.update(torch.tensor(2.0))
import matplotlib
matplotlib.use("Agg")
figure, _ = metric._plot()
print(json.dumps([sorted(heavy), used.Metric is Metric, used.MetricCollection is MetricCollection,
    hasattr(torchmetrics, "__warningregistry__"), torchmetrics.__version__, type(figure).__name__,
    "Accuracy" in vars(torchmetrics), torchmetrics.Accuracy.__module__]))
"""
    )
    import torchmetrics

    assert found == [
        [],
        True,
        True,
        False,
        torchmetrics.__version__,
        "Figure",
        False,
        "torchmetrics.classification.accuracy",
    ]


@pytest.mark.slow
def test_whoever_uses_another_name_gets_the_package_as_it_is_imported_alone():
    """Four threads that ask at once, too."""
    found = told_by(
        """
got, start = [], threading.Barrier(4)
def ask(name):
    start.wait()
    got.append(getattr(torchmetrics, name).__name__)
threads = [threading.Thread(target=ask, args=(name,)) for name in ("Accuracy", "AUROC", "MeanMetric", "R2Score")]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert sorted(got) == ["AUROC", "Accuracy", "MeanMetric", "R2Score"], got
import scipy.signal, transformers
assert hasattr(scipy.signal, "stft") and hasattr(transformers, "AutoModel")
assert not hasattr(torchmetrics, "no_such_name")
assert torchmetrics.metric.Metric is torchmetrics.Metric
assert isinstance(torchmetrics.Accuracy(task="binary"), torchmetrics.Metric)
"""
        + NAMES
    )
    assert found == told_by(NAMES, "import json\nimport torchmetrics\n")


@pytest.mark.slow
def test_each_submodule_can_be_the_first_that_is_used():
    """In forks of one process; classes are the same, whichever way they are reached."""
    found = told_by(
        """
failed = []
for name in ("classification", "functional", "image", "retrieval", "text"):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            module = import_module(f"torchmetrics.{name}")
            assert "Accuracy" not in vars(torchmetrics)
            assert torchmetrics.Accuracy is import_module("torchmetrics.classification").Accuracy
            assert sys.modules[module.__name__] is module is getattr(torchmetrics, name)
            code = 0
        finally:
            os._exit(code)
    if os.waitpid(child, 0)[1]:
        failed.append(name)
print(json.dumps(failed))
"""
    )
    assert found == []


@pytest.mark.parametrize("is_imported", [False, True])
def test_a_package_that_is_imported_already_or_of_another_layout_is_left_alone(is_imported, tmp_path):
    (tmp_path / "torchmetrics").mkdir()
    (tmp_path / "torchmetrics" / "__init__.py").write_text("LAYOUT = 'new'\n")
    found = told_by(
        f"""
sys.path.insert(0, {str(tmp_path)!r})
if {is_imported}:
    import torchmetrics
from wellfed.observe.loggers.torchmetrics_import import defer_torchmetrics
defer_torchmetrics()
import torchmetrics
others = [name for name in sys.modules if name.startswith("torchmetrics.")]
print(json.dumps([torchmetrics.LAYOUT, others, "__getattr__" in vars(torchmetrics)]))
""",
        "import json, sys\n",
    )
    assert found == ["new", [], False]
