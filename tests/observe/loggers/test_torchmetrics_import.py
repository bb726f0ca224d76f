"""torchmetrics: two classes of it until something else is used, then all of it, as if it had been imported as usual."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("scipy")
pytest.importorskip("transformers")

SETUP = """
import json, os, pkgutil, sys, threading
from importlib import import_module
import wellfed.observe.loggers.lightning_loggers
import lightning.pytorch as pl
import torch, torchmetrics
"""


def told_by(code: str, setup: str = SETUP) -> object:
    """What the last line of a fresh process is, as JSON."""
    done = subprocess.run([sys.executable, "-c", setup + code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_lightning_is_imported_without_what_metrics_alone_need():
    found = told_by(
        """
from torchmetrics import Metric, MetricCollection
import lightning.pytorch.core.module as used
heavy = {"scipy", "transformers", "pandas", "sklearn", "matplotlib", "torchmetrics.text"} & set(sys.modules)
print(json.dumps([sorted(heavy), used.Metric is Metric, used.MetricCollection is MetricCollection,
    hasattr(torchmetrics, "__warningregistry__"), "Accuracy" in vars(torchmetrics), torchmetrics.__version__]))
"""
    )
    import torchmetrics

    assert found == [[], True, True, False, False, torchmetrics.__version__]


def test_whoever_uses_another_name_gets_the_package_as_it_is_imported_alone():
    names = "print(json.dumps([sorted(vars(torchmetrics)), {k: [getattr(torchmetrics, k).__module__, "
    names += "id(getattr(torchmetrics, k)) == id(getattr(import_module(getattr(torchmetrics, k).__module__), k, "
    names += "getattr(torchmetrics, k)))] for k in torchmetrics.__all__ if k != 'functional'}]))"
    alone = told_by(names, "import json\nfrom importlib import import_module\nimport torchmetrics\n")
    assert told_by(f"import scipy, transformers\n{names}") == alone
    assert told_by(
        """
from torchmetrics import Accuracy
import scipy.signal, transformers
metric = Accuracy(task="multiclass", num_classes=3)
metric(torch.tensor([0, 1]), torch.tensor([0, 2]))
print(json.dumps([
    isinstance(metric, torchmetrics.Metric), torchmetrics.metric.Metric is torchmetrics.Metric,
    hasattr(torchmetrics, "no_such_name"), hasattr(scipy.signal, "stft"), hasattr(transformers, "AutoModel"),
    type(metric.plot()[0]).__name__, "__getattr__" in vars(torchmetrics)]))
"""
    ) == [True, True, False, True, True, "Figure", False]


@pytest.mark.slow
def test_each_submodule_can_be_the_first_that_is_used():
    """In forks of one process; classes are the same, whichever way they are reached."""
    found = told_by(
        """
failed = []
for name in sorted(each.name for each in pkgutil.iter_modules(torchmetrics.__path__)):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            module = import_module(f"torchmetrics.{name}")
            assert "Accuracy" not in vars(torchmetrics)
            assert torchmetrics.Accuracy is import_module("torchmetrics.classification").Accuracy
            assert torchmetrics.functional.accuracy is import_module("torchmetrics.functional").accuracy
            assert sys.modules[module.__name__] is module is getattr(torchmetrics, name)
            code = 0
        finally:
            os._exit(code)
    if os.waitpid(child, 0)[1]:
        failed.append(name)
print(json.dumps([failed, len(list(pkgutil.iter_modules(torchmetrics.__path__))) > 10]))
"""
    )
    assert found == [[], True]


def test_threads_that_ask_at_once_all_get_it():
    found = told_by(
        """
got, start = [], threading.Barrier(4)
def ask(name):
    start.wait()
    got.append(getattr(torchmetrics, name).__name__)
threads = [threading.Thread(target=ask, args=(name,)) for name in ("Accuracy", "AUROC", "MeanMetric", "R2Score")]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(json.dumps(sorted(got)))
"""
    )
    assert found == ["AUROC", "Accuracy", "MeanMetric", "R2Score"]


def test_a_metric_of_a_users_own_is_plotted_though_nothing_else_is_used():
    found = told_by(
        """
from torchmetrics import Metric
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
print(json.dumps([type(metric.plot()[0]).__name__, "Accuracy" in vars(torchmetrics)]))
"""
    )
    assert found == ["Figure", False]


def test_what_is_imported_already_is_left_alone():
    found = told_by(
        """
print(json.dumps(["__getattr__" in vars(torchmetrics), "Accuracy" in vars(torchmetrics)]))
""",
        "import torchmetrics\n" + SETUP,
    )
    assert found == [False, True]


def test_a_package_of_another_layout_is_imported_as_usual(tmp_path):
    (tmp_path / "torchmetrics").mkdir()
    (tmp_path / "torchmetrics" / "__init__.py").write_text("LAYOUT = 'new'\n")
    found = told_by(
        """
import torchmetrics
print(json.dumps([torchmetrics.LAYOUT, [name for name in sys.modules if name.startswith("torchmetrics.")]]))
""",
        f"""
import json, sys
sys.path.insert(0, {str(tmp_path)!r})
from wellfed.observe.loggers.torchmetrics_import import defer_torchmetrics
defer_torchmetrics()
""",
    )
    assert found == ["new", []]
