"""Parts of torchmetrics and of torch's compiler until more is used, then all, as if they had been imported as usual."""

import json
import subprocess
import sys

import pytest


@pytest.fixture
def extras() -> None:
    """Packages that torchmetrics imports where they are installed."""
    for name in ("matplotlib", "scipy", "transformers"):
        pytest.importorskip(name)


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


@pytest.mark.usefixtures("extras")
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
@pytest.mark.usefixtures("extras")
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


@pytest.mark.parametrize("is_imported", [False, True])
def test_a_package_that_is_imported_already_or_of_another_layout_is_left_alone(is_imported, tmp_path):
    (tmp_path / "torchmetrics").mkdir()
    (tmp_path / "torchmetrics" / "__init__.py").write_text("LAYOUT = 'new'\n")
    found = told_by(
        f"""
sys.path.insert(0, {str(tmp_path)!r})
if {is_imported}:
    import torchmetrics
from wellfed.observe.loggers.late_imports import defer_torchmetrics
defer_torchmetrics()
import torchmetrics
others = [name for name in sys.modules if name.startswith("torchmetrics.")]
print(json.dumps([torchmetrics.LAYOUT, others, "__getattr__" in vars(torchmetrics)]))
""",
        "import json, sys\n",
    )
    assert found == ["new", [], False]


TRAINED = """
weights = torch.nn.Linear(2, 1)
optimizer = torch.optim.AdamW(weights.parameters())
weights(torch.ones(3, 2)).sum().backward()
optimizer.step()
optimizer.zero_grad()
state = optimizer.state_dict()
"""


@pytest.mark.slow  # tests/end_to_end/test_imports.py
def test_a_training_without_compiler_imports_none():
    found = told_by(
        TRAINED
        + """
import lightning.pytorch
heavy = [name for name in sys.modules if name == "sympy" or name.startswith("torch._dynamo.")]
is_compiled = isinstance(weights, torch._dynamo.OptimizedModule)
print(json.dumps([heavy, is_compiled, hasattr(torch._dynamo, "__warningregistry__")]))
"""
    )
    assert found == [[], False, False]


@pytest.mark.slow
def test_what_was_made_before_the_compiler_is_known_to_it():
    """Steps of an optimizer are not traced, and Lightning knows a compiled module."""
    found = told_by(
        TRAINED
        + """
from lightning.fabric.wrappers import OptimizedModule
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection

def step():
    weights(torch.ones(3, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return torch.ones(2) * 2

compiled = torch.compile(weights, backend="eager")
traced = torch.compile(step, backend="eager")
before = [parameter.detach().clone() for parameter in weights.parameters()]
doubled = traced().tolist()
moved = all(not torch.equal(old, new) for old, new in zip(before, weights.parameters()))
zero_grad = torch.optim.Optimizer.zero_grad.__wrapped__
print(json.dumps([isinstance(compiled, OptimizedModule), isinstance(weights, OptimizedModule),
    isinstance(compiled, torch._dynamo.OptimizedModule), doubled, moved,
    vars(zero_grad)["__dynamo_disable"]._torchdynamo_disable, compiled(torch.ones(3, 2)).shape[0]]))
"""
    )
    assert found == [True, False, True, [2.0, 2.0], True, True, 3]
