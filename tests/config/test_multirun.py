"""The command line of a sweep: its axes, what all points share, and what is refused before anything runs."""

import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from hydra.core.config_loader import ConfigLoader
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from tests.kit.few import few
from wellfed import project
from wellfed.config.hydra_session import open_hydra
from wellfed.config.multirun import Multirun
from wellfed.errors import ConfigError
from wellfed.study.points.grid import OF_THE_SWEEP, Grid, group_of

TRAIN = project.sources() / "train.py"


def multirun(*typed: str, params: dict[str, str] | None = None) -> Multirun:
    """As Hydra opens it and hands it to the sweeper."""
    hydra = open_hydra()
    master = hydra.compose_config("train", [*typed, "hydra.mode=MULTIRUN"], RunMode.MULTIRUN)
    arguments = OmegaConf.to_container(master.hydra.overrides.task, resolve=False)
    assert isinstance(arguments, list)
    return Multirun(
        hydra.config_loader,
        master,
        params=params or {},
        arguments=list(map(str, arguments)),
        group_of=group_of,
        no_axes=OF_THE_SWEEP,
    )


def axes_of(made: Multirun) -> tuple[dict[str, tuple[str, ...]], tuple[str, ...]]:
    varied, fixed = made.varied()
    return {name: each.values for name, each in varied.items()}, fixed


@cache
def opened() -> tuple[ConfigLoader, DictConfig]:
    """Composed once for all that is refused, none of which changes it."""
    hydra = open_hydra()
    return hydra.config_loader, hydra.compose_config("train", ["hydra.mode=MULTIRUN"], RunMode.MULTIRUN)


def faults_of(*typed: str, params: dict[str, str] | None = None) -> str:
    refused = Multirun(*opened(), params=params or {}, arguments=typed, group_of=group_of, no_axes=OF_THE_SWEEP)
    with pytest.raises(ConfigError) as caught:
        refused.varied()
    return "\n".join(map(str, caught.value.faults))


def test_axes_come_from_the_option_and_from_the_command_line() -> None:
    axes, fixed = axes_of(multirun("seed=1,2", "gpu=8gb", params={"loader": "auto,baseline", "memory": "cache"}))
    assert axes == {"loader": ("auto", "baseline"), "seed": ("1", "2")}
    assert list(axes) == ["loader", "seed"]
    assert fixed == ("memory=cache", "gpu=8gb")


@pytest.mark.parametrize(
    ("typed", "axes", "fixed"),
    [
        ("loader=auto", {}, ("loader=auto",)),
        ("loader=balanced,auto", {"loader": ("balanced", "auto")}, ()),
    ],
)
def test_what_is_typed_replaces_the_options_axis(typed: str, axes: object, fixed: object) -> None:
    assert axes_of(multirun(typed, params={"loader": "auto,baseline"})) == (axes, fixed)


@pytest.mark.parametrize(
    ("typed", "values"),
    few(
        [
            ("seed=range(1,4)", ("1", "2", "3")),
            ("seed=choice(3,1)", ("3", "1")),
            ("workload.optimizer.lr=0.1,1e-3", ("0.1", "0.001")),
            ("loader.skip_ids=[1],[1,2]", ("[1]", "[1,2]")),
            ("+workload.data.path='a,b','c d'", ("'a,b'", "'c d'")),
            ("loader.num_workers=null,2", ("null", "2")),
        ],
        3,
    ),
)
def test_values_may_be_typed_in_every_way_that_has_an_end(typed: str, values: tuple[str, ...]) -> None:
    axes, _ = axes_of(multirun(typed))
    assert list(axes.values()) == [values]


@pytest.mark.parametrize(
    ("typed", "words"),
    few(
        [
            ("loader=baseline,fast", "loader=baseline,fast: there is no option fast."),
            ("gpu=8gb,42gb", "Did you mean gpu=24gb?"),
            ("loader.num_worker=1,2", "there is no knob loader.num_worker. Did you mean loader.num_workers?"),
            ("batch_size=32,64", "there is no knob batch_size. Did you mean workload.effective_batch_size?"),
            ("sweep=quick,full", "is no axis: it says how the sweep itself is run or watched. Name one."),
            ("sweep.retry=oom,failed", "Write sweep.retry=[oom,failed] for a list, or one value."),
            ("sweep.trial_steps=10,20", "is no axis"),
            ("logger=none,wandb", "is no axis"),
            ("logger.mode=auto,disabled", "is no axis"),
            ("telemetry.interval_s=1,2", "is no axis"),
            ("trainer.gradient_clip=interval(0,1)", "has no end of values. Name them: trainer.gradient_clip=1,2,4"),
            ("seed=range(5,5)", "is an axis with no value."),
            ("seed=range(0,1000000000000)", "is an axis with 100,000 values or more."),
        ],
        7,
    ),
)
def test_what_can_be_no_axis_is_refused(typed: str, words: str) -> None:
    assert words in faults_of(typed)
    assert faults_of(typed).startswith(f"{typed}: ")


def test_an_axis_of_the_option_is_checked_too() -> None:
    assert "there is no option fast" in faults_of(params={"loader": "fast,auto"})


def test_all_that_is_refused_is_told_at_once() -> None:
    told = faults_of("loader=baseline,fast", "seed=range(5,5)", "sweep.trial_steps=10,20")
    assert len(told.splitlines()) == 3


@pytest.mark.parametrize(
    ("typed", "folder"),
    [
        ([], None),
        (["hydra.sweep.dir=some/where"], Path("some/where")),
        (["hydra.sweep.dir=${paths.log_dir}/x", "paths.log_dir=there"], Path("there/x")),
        (["hydra.sweep.subdir=x"], None),
    ],
)
def test_the_folder_where_one_was_typed(typed: list[str], folder: Path | None) -> None:
    assert multirun(*typed).typed_dir == folder


def test_the_base_needs_no_value_that_each_point_has() -> None:
    base = multirun("trainer.devices=0", "sweep.trial_steps=50").base()
    assert base.config.sweep.trial_steps == 50
    assert base.run_dir is None


@pytest.mark.parametrize("typed", ["sweep.trial_steps=1", "telemetry.interval_s=-1"])
def test_what_no_point_can_put_right_is_refused_at_once(typed: str) -> None:
    with pytest.raises(ConfigError, match=typed.partition("=")[0]):
        multirun(typed).base()


def test_a_point_is_composed_of_its_values_and_writes_to_its_folder(tmp_path: Path) -> None:
    opened = multirun("loader=baseline,balanced", "seed=3", "loader.pin_memory=false")
    points = Grid(*axes_of(opened)).points()
    composed = [opened.compose(point.overrides, tmp_path / point.id) for point in points]
    assert [each.choices["loader"] for each in composed] == ["baseline", "balanced"]
    assert {each.config.seed for each in composed} == {3}
    assert {each.config.loader.pin_memory for each in composed} == {False}
    assert [each.run_dir for each in composed] == [tmp_path / point.id for point in points]
    assert [each.overrides for each in composed] == [point.overrides for point in points]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("overrides", "where"),
    [
        (["trainer.devices=0", "loader.num_workers=-1"], {"trainer.devices=0", "loader.num_workers=-1"}),
        (["seed=x", "loader.num_worker=1"], {"seed=x", "loader.num_worker=1"}),
    ],
    ids=["rules", "what does not compose"],
)
def test_a_bad_point_gives_all_its_faults(tmp_path: Path, overrides: list[str], where: set[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        multirun().compose(overrides, tmp_path)
    assert {fault.where for fault in caught.value.faults} == where


def test_hydra_finds_our_plugins_and_lists_them() -> None:
    shown = subprocess.run(
        [sys.executable, str(TRAIN), "--info", "plugins"], capture_output=True, text=True, check=True
    )
    assert "WellfedSweeper" in shown.stdout


def test_our_plugins_cost_hydras_start_nothing_heavy() -> None:
    """They are imported at every start, of other programs with Hydra too."""
    code = """
import sys
from hydra.core.plugins import Plugins
names = {plugin.__name__ for plugin in Plugins.instance().discover()}
assert "WellfedSweeper" in names, names
print(sorted({"torch", "lightning", "numpy", "pandas", "wandb", "rich", "wellfed"} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": str(TRAIN.parent)}
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_a_value_that_a_knob_refuses_is_refused_at_a_later_point() -> None:
    made = multirun()
    made.compose(["trainer.max_steps=5"], Path("runs/a"))
    with pytest.raises(ConfigError, match=r"trainer\.max_steps=many"):
        made.compose(["trainer.max_steps=many"], Path("runs/b"))
    assert made.compose(["trainer.max_steps=6"], Path("runs/c")).config.trainer.max_steps == 6
