"""Targets and their arguments: packages (before any import), and signature (after it)."""

import subprocess
import sys

import pytest

from wellfed.config.faults.target_faults import check_imported, check_static
from wellfed.config.schema import ScheduleConfig

DATACLASS = "wellfed.contract.Datasets"


def faults_of(config):
    return [*check_static(config), *check_imported(config)]


def data(**entries):
    return {"workload.data": {"_target_": DATACLASS, "train": [], **entries}}


@pytest.mark.parametrize(
    ("knobs", "where", "problem", "way_out"),
    [
        (
            data(vall=[]),
            "workload.data.vall=[]",
            f"{DATACLASS} has no argument vall.",
            "Did you mean workload.data.val=",
        ),
        (data(zzz=3), "workload.data.zzz=3", "has no argument zzz.", "It takes: train, val, test"),
        (
            {"workload.data": {"_target_": DATACLASS}},
            "workload.data",
            f"{DATACLASS} needs the argument train.",
            "Add +workload.data.train=<value>",
        ),
        (
            {"workload.data": {"_target_": "torchx.f"}},
            "workload.data._target_=torchx.f",
            "there is no package torchx.",
            "",
        ),
        (
            {"workload.data": {"_target_": "torch"}},
            "workload.data._target_=torch",
            "is no class or function, but a module.",
            "",
        ),
        (
            data(notes={"deep": [{"_target_": "no_package.f"}]}),
            "workload.data.notes.deep[0]._target_=no_package.f",
            "there is no package no_package.",
            "",
        ),
        (
            {"workload.data": {"_target_": "wellfed.contract.Dataset"}},
            "workload.data._target_=wellfed.contract.Dataset",
            "wellfed.contract has no Dataset.",
            "Did you mean workload.data._target_=wellfed.contract.Datasets?",
        ),
        (
            {"workload.data": {"_target_": "wellfed.contrakt.Datasets"}},
            "workload.data._target_=wellfed.contrakt.Datasets",
            "wellfed has no contrakt.",
            "Did you mean workload.data._target_=wellfed.contract.Datasets?",
        ),
        ({"workload.data": {"_target_": 3}}, "workload.data._target_=3", "is not a dotted name.", "Set "),
        ({"workload.data": {"_target_": "torch..f"}}, "workload.data._target_=torch..f", "is not a dotted name.", ""),
        (
            {"workload.data": 3},
            "workload.data",
            "names nothing to build: it has no _target_.",
            "Set workload.data._tar",
        ),
        ({"workload.model": {}}, "workload.model", "names nothing to build", ""),
        (
            {"workload.optimizer": {"_target_": "torch.optim.AdamW", "params": 3}},
            "workload.optimizer.params=3",
            "is handed params already.",
            "Take it away: ~workload.optimizer.params",
        ),
        (
            {"workload.optimizer": {"_target_": "torch.optim.AdamW", "weight_decy": 0.1}},
            "workload.optimizer.weight_decy=0.1",
            "torch.optim.AdamW has no argument weight_decy.",
            "Did you mean workload.optimizer.weight_decay=0.1?",
        ),
    ],
)
def test_faults(make_config, knobs, where, problem, way_out):
    fault = faults_of(make_config(knobs))[0]
    assert fault.where == where
    assert problem in fault.problem
    assert way_out in fault.way_out


@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"workload.optimizer": {"_target_": "torch.optim.AdamW", "lr": 1e-3, "betas": [0.9, 0.99], "fused": None}},
        {"workload.optimizer": None},
        {"workload.model": {"_target_": "torch.nn.Linear"}},  # the data may bring in_features
        {"workload.data": {"_target_": DATACLASS, "_args_": [[]]}},
        {"workload.data": {"_target_": DATACLASS, "_partial_": True}},
        {"workload.data": {"_target_": "my_pkg.f"}},
    ],
)
def test_lets_through(make_config, monkeypatch, tmp_path, knobs):
    (tmp_path / "my_pkg.py").write_text("def f(a=1): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert faults_of(make_config(knobs)) == []


def test_a_file_that_is_not_python_is_named(make_config, monkeypatch, tmp_path):
    (tmp_path / "my_broken.py").write_text("x = 1\ndef f(:\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    knobs = {"workload.data": {"_target_": "my_broken.f"}}
    (fault,) = faults_of(make_config(knobs))
    assert f"{tmp_path / 'my_broken.py'}:2 is not Python" in fault.problem


DECORATED = """
import functools
def deco(f):
    @functools.wraps(f)
    def inner(*args, **kwargs): return f(*args, **kwargs)
    return inner
@deco
def f(path, size: int = 3): ...
"""


@pytest.fixture
def decorated(make_config, monkeypatch, tmp_path):
    (tmp_path / "my_decorated.py").write_text(DECORATED)
    (tmp_path / "my_importing.py").write_text(
        "import no_such_package_at_all\ndef deco(f): return f\n@deco\ndef f(): ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(**entries):
        return make_config({"workload.data": entries})

    return make


def test_a_decorated_function_is_held_against_what_it_wraps(decorated):
    config = decorated(_target_="my_decorated.f", path="a", sizee="big")
    assert check_static(config) == []
    assert [fault.where for fault in check_imported(config)] == ["workload.data.sizee=big"]


def test_a_package_that_a_target_lacks_is_named(decorated):
    (fault,) = check_imported(decorated(_target_="my_importing.f"))
    assert fault.problem == "needs the package no_such_package_at_all, which is not installed."
    assert fault.way_out == "Install it: python -m pip install no_such_package_at_all."


def test_a_c_function_is_left_to_its_call(make_config):
    assert check_imported(make_config({"workload.data": {"_target_": "torch.relu"}})) == []


def test_names_are_checked_without_torch():
    code = (
        "import sys\nfrom wellfed.config.faults.target_faults import check_static\n"
        "from wellfed.config.schema import RunConfig\n"
        "c = RunConfig()\nc.workload.model = {'_target_': 'torch.nn.Linear', 'in_features': 'x'}\n"
        "c.workload.data = {'_target_': '3.f'}\nc.workload.optimizer = {'_target_': 'no_such_package.AdamW'}\n"
        "assert len(check_static(c)) == 2\nassert not {'torch', 'numpy'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": "src"})
    assert (done.returncode, done.stderr) == (0, "")


SCHEDULERS = "torch.optim.lr_scheduler"
HALVING = {"_target_": f"{SCHEDULERS}.ExponentialLR", "gamma": 0.5}
WARMUP = {"_target_": f"{SCHEDULERS}.LinearLR", "total_iters": 4}


def of_schedule(**entries: object) -> dict[str, object]:
    schedule = ScheduleConfig()
    vars(schedule).update(entries)
    return {"workload.schedule": schedule}


@pytest.mark.parametrize(
    ("knobs", "where", "problem"),
    [
        (of_schedule(_target_=f"{SCHEDULERS}.StepLR"), "workload.schedule", "needs the argument step_size."),
        (of_schedule(**HALVING, gama=1), "workload.schedule.gama=1", "has no argument gama."),
        (of_schedule(**HALVING, optimizer=1), "workload.schedule.optimizer=1", "is handed optimizer already."),
        (
            of_schedule(_target_=f"{SCHEDULERS}.StpLR"),
            f"workload.schedule._target_={SCHEDULERS}.StpLR",
            "has no StpLR.",
        ),
        (
            of_schedule(
                _target_=f"{SCHEDULERS}.SequentialLR",
                milestones=[4],
                schedulers=[WARMUP, {"_target_": f"{SCHEDULERS}.ExponentialLR"}],
            ),
            "workload.schedule.schedulers[1]",
            "needs the argument gamma.",
        ),
        (
            {"callbacks": {"stop": {"_target_": "lightning.pytorch.callbacks.EarlyStopping"}}},
            "callbacks.stop",
            "needs the argument monitor.",
        ),
        ({"callbacks": {"stop": {"patience": 3}}}, "callbacks.stop", "has no _target_."),
        (
            {"callbacks": {"own": {"_target_": "own.Callback"}}},
            "callbacks.own._target_=own.Callback",
            "there is no package own.",
        ),
    ],
)
def test_schedulers_and_callbacks_are_held_against_their_code(make_config, knobs, where, problem):
    (fault,) = faults_of(make_config(knobs))
    assert fault.where == where
    assert problem in fault.problem


def test_an_optimizer_is_handed_to_each_scheduler(make_config):
    sequence = {"_target_": f"{SCHEDULERS}.SequentialLR", "milestones": [4], "schedulers": [WARMUP, HALVING]}
    assert faults_of(make_config(of_schedule(**sequence))) == []
    assert faults_of(make_config({"callbacks": {"left_out": None}})) == []


@pytest.fixture
def numbered(tmp_path, monkeypatch):
    text = 'def f(rate: float = 0.1, depth=2, name: str = "1", loose=False): ...\n'
    (tmp_path / "my_numbers.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))


def test_a_text_where_a_number_is_needed(make_config, numbered):
    given = {"rate": "1e-3", "depth": "3", "name": "7", "loose": "true"}
    config = make_config({"workload.data": {"_target_": "my_numbers.f", **given}})
    faults = check_imported(config)
    assert [fault.where for fault in faults] == ["workload.data.rate=1e-3", "workload.data.depth=3"]
    assert "is the text '1e-3': write 1e-3 without quotes" in faults[0].way_out


def test_keys_of_hydra_are_no_arguments_and_nodes_that_are_not_built_are_not_checked(make_config, numbered):
    inner = {"_target_": "no_such_package_at_all.f", "nope": 1}
    node = {"_target_": "my_numbers.f", "_convert_": "all", "_recursive_": False, "depth": inner}
    config = make_config({"workload.data": node})
    assert (check_static(config), check_imported(config)) == ([], [])
    node["_recursive_"] = True
    assert [fault.where for fault in check_static(config)] == ["workload.data.depth._target_=no_such_package_at_all.f"]
