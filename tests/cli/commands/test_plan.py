"""``python -m wellfed plan``."""

import json
import shlex
import shutil
import subprocess
import sys

import pytest

from tests.end_to_end.commands import ROOT, environment
from wellfed.cli import main as cli
from wellfed.cli.commands import plan as app
from wellfed.config.compose import compose
from wellfed.errors import EXIT_NOTHING_RUN, ConfigError
from wellfed.run.planner import plan_without_running

SMALL = ("workload.data.scale=0.02", "workload.model.encoder_layers=1")


@pytest.fixture(scope="module")
def eight_gb():
    return plan_without_running(compose([*SMALL, "gpu=8gb", "memory=cache", "workload=recsys"])).to_dict()


def test_a_card_that_is_not_there_is_planned_for(eight_gb):
    assert (eight_gb["fits"], eight_gb["budget_gib"], eight_gb["findings"]) == (True, 7.2, [])
    assert "8 GiB" in eight_gb["imagined"]
    assert 0 < eight_gb["predicted_peak_gib"] < 7.2
    knobs = eight_gb["plan"]
    assert knobs["trainer.accelerator"]["value"] == "gpu"
    assert knobs["memory.features"] == {**knobs["memory.features"], "value": "cache", "source": "set"}
    assert all(entry["because"] for entry in knobs.values())
    assert eight_gb["parts"]["feature table"] > 0
    assert sum(eight_gb["parts"].values()) == pytest.approx(eight_gb["predicted_peak_gib"] * 2**30)


@pytest.mark.slow
def test_a_larger_card_has_the_larger_budget(eight_gb):
    found = plan_without_running(compose([*SMALL, "gpu=24gb", "memory=cache", "workload=recsys"])).to_dict()
    assert found["budget_gib"] == 21.6
    assert found["parts"] == eight_gb["parts"], "the same step needs the same"


@pytest.mark.slow
def test_what_does_not_fit_names_ways_out_that_do():
    big = ["gpu.memory_gib=0.04", "memory.features=dynamic", "memory.micro_batch=2048"]
    found = plan_without_running(compose([*SMALL, "gpu=8gb", *big]))
    answer = found.to_dict()
    assert answer["fits"] is False
    (finding,) = answer["findings"]
    assert finding["changes_learning"] is False
    assert finding["evidence"]["predicted_peak_gib"] > 0.9 * 0.04
    assert finding["change"]
    for change in finding["change"]:
        again = plan_without_running(compose([*SMALL, "gpu=8gb", *big, *change.split()]))
        assert again.plan.misfit is None, change


@pytest.mark.slow  # tests/end_to_end/test_imports.py
def test_paths_are_read_as_training_reads_them(tmp_path, capsys):
    """A space and a parenthesis mean something to Hydra."""
    folder = tmp_path / "a (b), c"
    assert cli.main(["fit", *SMALL, "gpu=8gb", f"paths.cache_dir={folder}"]) == 0
    out = capsys.readouterr().out
    words = shlex.split(next(line for line in out.splitlines() if line.startswith("Use it: ")))
    assert compose(words[4:]).config.paths.cache_dir == str(folder)


@pytest.mark.slow
def test_what_does_not_fit_exits_2_with_the_message(capsys):
    code = app.main([*SMALL, "gpu=8gb", "gpu.memory_gib=0.002", "memory.features=dynamic", "--json"])
    out, err = capsys.readouterr()
    assert (code, json.loads(out)["fits"]) == (EXIT_NOTHING_RUN, False)
    assert "the budget is 2.0 MiB" in err


@pytest.mark.slow  # tests/end_to_end/test_imports.py
def test_a_typo_is_told_as_training_tells_it_before_torch_is_there():
    codes = "[main([name, 'gpu=9gb']) for name in ('plan', 'fit')]"
    script = f"import sys; from wellfed.cli.main import main; print({codes}, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[2, 2] False"
    assert done.stderr.count("Did you mean gpu=8gb?") == 2


@pytest.mark.slow
def test_planning_imports_no_lightning_and_what_the_model_needs_alone():
    words = [*SMALL, "gpu=8gb", "workload.model.text=none"]
    dear = {"lightning", "transformers", "torchmetrics", "matplotlib", "wandb"}
    script = (
        f"import sys; from wellfed.cli.main import main; main(['plan', *{words}]); print({dear} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "set()", done.stderr


@pytest.mark.slow
def test_a_plan_that_is_written_is_the_same_plan_again(tmp_path, monkeypatch, capsys):
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    (tmp_path / "src").symlink_to(ROOT / "src")
    monkeypatch.setenv("WELLFED_PROJECT", str(tmp_path))
    given = [*SMALL, "experiment=recsys_8gb", "loader=aggressive", "--json", "--write", "mine"]
    assert app.main(given) == 0
    first = json.loads(capsys.readouterr().out)
    assert app.main(["experiment=mine", "--json"]) == 0
    second = json.loads(capsys.readouterr().out)
    values = [{knob: entry["value"] for knob, entry in found["plan"].items()} for found in (first, second)]
    assert values[0] == values[1]
    assert second["parts"] == first["parts"]
    with pytest.raises(ConfigError, match="--force"):
        app.main(given)
