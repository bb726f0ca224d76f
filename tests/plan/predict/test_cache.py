import dataclasses
import importlib
import json
import sys

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.memory_cases import Mlp, adamw
from tests.kit.few import few, slow
from wellfed.plan.predict import cache
from wellfed.plan.predict.cache import FILE_NAME, cached_measure, digest, load
from wellfed.plan.predict.estimate import measure, repeated
from wellfed.plan.predict.peak import NoEstimate
from wellfed.plan.predict.rehearsal import Task
from wellfed.train.step.micro_batches import Preparation

SAMPLE = {"x": torch.zeros(4, 64), "label": torch.zeros(4, dtype=torch.long)}
TASK = Task(repeated(SAMPLE), adamw)


@pytest.fixture
def asked(monkeypatch):
    """How often it was measured."""
    times = []

    def count(*args, **more):
        times.append(args)
        return measure(*args, **more)

    monkeypatch.setattr(cache, "measure", count)
    return times


def test_the_second_time_it_is_read(tmp_path, asked):
    first, second = (cached_measure(Mlp(8), TASK, 4, tmp_path) for _ in range(2))
    assert first == second
    assert len(asked) == 1
    (file,) = tmp_path.rglob("*.json*")
    assert file == tmp_path / "footprints" / digest(Mlp(8), TASK, 4) / FILE_NAME


@pytest.fixture(scope="module")
def of_mlp():
    return measure(Mlp(8), TASK, 4)


@pytest.mark.parametrize("text", ["{", '{"format": 99}', *map(slow, ("", "{}", "[]", "\x00"))])
def test_a_damaged_file_is_written_anew(tmp_path, asked, of_mlp, text):
    file = tmp_path / "footprints" / digest(Mlp(8), TASK, 4) / FILE_NAME
    file.parent.mkdir(parents=True)
    file.write_text(text)
    assert load(file) is None
    assert cached_measure(Mlp(8), TASK, 4, tmp_path) == of_mlp == load(file)
    assert len(asked) == 1


def test_where_nothing_can_be_written_nothing_is_kept(tmp_path, asked):
    (tmp_path / "footprints").write_text("a file")
    assert cached_measure(Mlp(8), TASK, 4, tmp_path).parameters > 0
    assert cached_measure(Mlp(8), TASK, 4, tmp_path).parameters > 0
    assert len(asked) == 2


class GivesNothing:
    def on_device(self, batch, rng):
        return None


def test_no_estimate_is_not_kept(tmp_path):
    broken = dataclasses.replace(TASK, prepare=Preparation(GivesNothing(), 0))
    assert isinstance(cached_measure(Mlp(8), broken, 4, tmp_path), NoEstimate)
    assert list(tmp_path.rglob("*")) == []


def test_what_fails_before_there_is_a_digest_is_explained(tmp_path):
    def fail(model):
        raise RuntimeError("no such optimizer")

    found = cached_measure(Mlp(8), dataclasses.replace(TASK, make_optimizer=fail), 4, tmp_path)
    assert "no such optimizer" in found.reason


class Data:
    def __init__(self, crop):
        self.crop, self.made = crop, object()


def changed(**more):
    return dataclasses.replace(TASK, **more)


def model_with(probability):
    model = Mlp(8)
    model.layers[4].p = probability
    return model


def frozen():
    model = Mlp(8)
    model.layers[0].weight.requires_grad = False
    return model


def with_optimizer(**more):
    return changed(make_optimizer=lambda model: torch.optim.AdamW(model.parameters(), **more))


@pytest.fixture(scope="module")
def plain():
    return digest(Mlp(8), TASK, 4)


@pytest.mark.parametrize(
    ("model", "task", "samples"),
    few(
        [
            (Mlp(16), TASK, 4),
            (model_with(0.2), TASK, 4),
            (frozen(), TASK, 4),
            (Mlp(8).eval(), TASK, 4),
            (nn.Sequential(Mlp(8)), TASK, 4),
            (Mlp(8), TASK, 8),
            (Mlp(8), changed(precision="bf16-mixed"), 4),
            (Mlp(8), changed(checkpointed=True), 4),
            (Mlp(8), changed(channels_last=True), 4),
            (Mlp(8), changed(feature_mode="cache"), 4),
            (Mlp(8), changed(compile_mode="default"), 4),
            (Mlp(8), changed(shaped_by=(Data(3),)), 4),
            (Mlp(8), changed(make_batch=repeated({"x": torch.zeros(4, 65)})), 4),
            (Mlp(8), changed(make_optimizer=lambda model: torch.optim.Adam(model.parameters())), 4),
            (Mlp(8), with_optimizer(lr=1e-3, fused=True), 4),
            (Mlp(8), with_optimizer(lr=1e-3, weight_decay=0.0), 4),
        ],
        8,
    ),
)
def test_what_changes_memory_changes_the_digest(model, task, samples, plain):
    assert digest(model, task, samples) != plain


def test_weights_rates_and_addresses_do_not():
    torch.manual_seed(1)
    assert digest(Mlp(8), with_optimizer(lr=1e-3), 4) == digest(Mlp(8), with_optimizer(lr=1e-2), 4)
    assert digest(Mlp(8), changed(shaped_by=(Data(3),)), 4) == digest(Mlp(8), changed(shaped_by=(Data(3),)), 4)
    assert digest(Mlp(8), changed(shaped_by=(Data(3),)), 4) != digest(Mlp(8), changed(shaped_by=(Data(4),)), 4)


def test_the_file_is_json_for_people(tmp_path):
    found = cached_measure(Mlp(8), TASK, 4, tmp_path)
    (file,) = tmp_path.rglob(FILE_NAME)
    assert json.loads(file.read_text())["parameters"] == found.parameters


class Sizes:
    """A plain object that a data set may hold."""

    def __init__(self, **sizes):
        vars(self).update(sizes)


def shaped_by(**held):
    return digest(Mlp(8), changed(shaped_by=(Sizes(**held),)), 4)


def test_what_is_held_by_a_data_set_counts():
    held = [
        {},
        {"inner": Sizes(crop=3)},
        {"inner": Sizes(crop=4)},
        {"inner": Sizes(deep=Sizes(crop=4))},
        {"sizes": torch.tensor([1, 2])},
        {"sizes": torch.tensor([1, 3])},
        {"sizes": np.array([1, 3])},
        {"sizes": [1, 3]},
        {"sizes": {"a": 3}},
        {"words": {"a", "b"}},
    ]
    assert len({shaped_by(**each) for each in held}) == len(held)
    assert shaped_by(inner=Sizes(crop=3)) == shaped_by(inner=Sizes(crop=3))


def test_big_contents_count_by_their_size():
    class Rows(list):
        def __repr__(self):
            raise AssertionError("never asked for")

    assert shaped_by(rows=Rows(range(10**6))) != shaped_by(rows=Rows(range(10**6 + 1)))
    big = torch.zeros(10**6)
    assert shaped_by(rows=big) == shaped_by(rows=big + 1) != shaped_by(rows=big[1:])


def test_what_holds_itself_has_an_end():
    around = Sizes()
    around.itself = around
    assert shaped_by(inner=around) == shaped_by(inner=around)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A model whose base and whose function are in other files of its package."""
    home = tmp_path / "theirs"
    home.mkdir()
    (home / "__init__.py").write_text("")
    (home / "base.py").write_text("from torch import nn\nclass Base(nn.Linear): pass\n")
    (home / "functions.py").write_text("def scale(x): return x\n")
    (home / "net.py").write_text("from . import functions\nfrom .base import Base\nclass Net(Base): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield home
    for name in [name for name in sys.modules if name.partition(".")[0] == "theirs"]:
        del sys.modules[name]


@pytest.mark.parametrize("file", few(["base.py", "functions.py", "net.py"], 1))
def test_a_change_in_any_file_of_the_models_package_counts(package, file):
    model = importlib.import_module("theirs.net").Net(64, 8)
    before = digest(model, TASK, 4)
    assert digest(model, TASK, 4) == before
    with (package / file).open("a") as stream:
        stream.write("# changed\n")
    assert digest(model, TASK, 4) != before


def test_a_change_in_a_helper_of_the_project_counts(tmp_path, monkeypatch):
    """The model's package imports it from elsewhere in the project's folder of packages."""
    sources = tmp_path / "src"
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "train.yaml").write_text("")
    for name, text in {"their_net": "from torch import nn\nimport their_helper.scale\n", "their_helper": ""}.items():
        (sources / name).mkdir(parents=True)
        (sources / name / "__init__.py").write_text(text)
    (sources / "their_net" / "net.py").write_text("from torch import nn\nclass Net(nn.Linear): pass\n")
    (sources / "their_helper" / "scale.py").write_text("def scale(x): return x\n")
    monkeypatch.setenv("WELLFED_PROJECT", str(tmp_path))
    monkeypatch.syspath_prepend(sources)
    model = importlib.import_module("their_net.net").Net(64, 8)
    try:
        before = digest(model, TASK, 4)
        (sources / "their_helper" / "scale.py").write_text("def scale(x): return 2 * x\n")
        assert digest(model, TASK, 4) != before
    finally:
        for name in [name for name in sys.modules if name.startswith("their_")]:
            del sys.modules[name]
