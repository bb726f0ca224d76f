"""What no search can be made of is told before torch is imported, and leaves nothing."""

from pathlib import Path

import pytest

from tests.kit.few import few
from wellfed.config.entry import main
from wellfed.config.faults import check_composed
from wellfed.process import MAY_FORK

pytestmark = pytest.mark.skipif(not MAY_FORK, reason="forks")
LR = "workload.optimizer.lr"
NOT_TOGETHER = "sweep=quick: times short trials, and search=optuna runs whole trainings: not both."


@pytest.mark.parametrize(
    ("typed", "words"),
    few([
        (["sweep=quick", "search=optuna", f"{LR}=interval(0.1,1)"], [NOT_TOGETHER, "Leave one of them out."]),
        ([f"{LR}=interval(0.1,1)"], ["has no end of values", "search=optuna takes an interval"]),
        (["search=grid", f"{LR}=interval(0.1,1)"], ["has no end of values"]),
        (["search=optuna", f"{LR}=interval(1,0.1)"], ["ends before it starts", f"{LR}=interval(0.1,1)"]),
        (["search=optuna"], ["search=optuna: has no axis", f"{LR}=interval(1e-4,1e-1)"]),
        (["search=optuna", "seed=1,2", "workload=recsys,forecast"], ["workload=recsys,forecast: is no axis"]),
        (["search=grid", "trainer.num_nodes=2", "seed=1,2"], ["trainer.num_nodes=2: a trial is on one machine."]),
        (["sweep=quick", "trainer.num_nodes=2", "seed=1,2"], ["trainer.num_nodes=2: a trial is on one machine."]),
        (["search=grid", "search.pruner=asha", "seed=1,2"], ["search.pruner=asha", "Set search=optuna"]),
        (["search.name=a/b", "seed=1,2"], ["search.name=a/b: becomes the name of a folder"]),
        (["search.max_trials=5", "seed=1,2,3", f"{LR}=0.1,0.2"], ["6 whole trainings (3 of seed x 2 of"]),
        (["search=optuna", "workload.data.api_key=a,b"], ["workload.data.api_key: is a secret by its name"]),
        (["sweep=quick", "workload.data.api_key=a,b"], ["workload.data.api_key: is a secret by its name, and a sweep"]),
        (["search=optuna", "workload.data.secret_scale=interval(0.1,0.9)"], ["is a secret by its name, and a search"]),
        (["search=optuna", "hydra/launcher=basic", "seed=1,2"], ["other launchers can't", "search=grid"]),
        (["search=optuna", "trainer.best_metric=loss", "seed=1,2"], ["does not say whether more is better"]),
    ], 4),
)  # fmt: skip
def test_what_no_search_can_be_made_of(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    typed: list[str],
    words: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main("train", lambda composed: 0, ["-m", *typed]) == 2
    err = capsys.readouterr().err
    assert [word for word in words if word not in err] == [], err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("group", few(["sweep", "search"], 1))
def test_an_option_that_sets_other_groups_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str
) -> None:
    """Trials of a search would lack it, and so would the commands that a sweep prints."""
    monkeypatch.chdir(tmp_path)
    option = tmp_path / "mine" / group / "own.yaml"
    option.parent.mkdir(parents=True)
    name = {"sweep": "{trial_steps: 70}", "search": "{max_trials: 5}"}[group]
    option.write_text(f"# @package _global_\n{group}: {name}\ntrainer: {{max_steps: 9}}\ngpu: {{precision: 32-true}}\n")
    typed = ["-m", "--config-dir", "mine", f"{group}=own", "trainer.max_steps=9", "seed=1,2"]
    assert main("train", lambda composed: 0, typed) == 2
    err = capsys.readouterr().err
    assert f"{group}=own: sets gpu.precision=32-true" in err
    assert f"may set only {group}.* and hydra.*. Type gpu.precision on the command line" in err
    assert "max_steps" not in err
    assert [*tmp_path.iterdir()] == [tmp_path / "mine"]


@pytest.mark.parametrize("option", few(["optuna", "grid"], 1))
def test_a_search_option_needs_multirun(capsys: pytest.CaptureFixture[str], option: str) -> None:
    assert main("train", lambda composed: 0, [f"search={option}"]) == 2
    assert f"Add -m: python src/train.py -m search={option}" in capsys.readouterr().err


def test_without_optuna_the_way_to_it_is_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    known = check_composed.is_installed
    monkeypatch.setattr(check_composed, "is_installed", lambda name: name != "optuna" and known(name))
    assert main("train", lambda composed: 0, ["-m", "search=optuna", f"{LR}=interval(0.1,1)"]) == 2
    err = capsys.readouterr().err
    assert (
        "search.sampler=tpe: needs the package optuna (searches that choose their values), which is not installed."
        in err
    )
    assert "python -m pip install 'wellfed[search]'" in err
