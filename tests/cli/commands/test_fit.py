"""``python -m wellfed fit`` on a CPU."""

import json

import pytest

from wellfed.cli import main as cli
from wellfed.cli.commands import fit as app
from wellfed.errors import EXIT_NOTHING_RUN
from wellfed.plan.predict.size_search import Peak, Probe
from wellfed.units import GIB

SMALL = ("workload.data.scale=0.02", "workload.model.encoder_layers=1", "workload.model.encoder_dim=16")


def test_it_prints_a_row_a_size_and_what_to_type(capsys):
    assert app.main([*SMALL, "gpu=8gb", "workload.effective_batch_size=64"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("micro-batch 2: ")
    assert "Stopped by" in out
    assert "Use it: python src/train.py workload.data.scale=0.02" in out
    assert "memory.micro_batch=" in out


@pytest.mark.slow
def test_as_json(capsys):
    assert app.main([*SMALL, "gpu=8gb", "gpu.precision=bf16-mixed", "workload.effective_batch_size=32", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["micro_batch"] in [probe["size"] for probe in found["probes"]]
    assert found["budget_gib"] == 7.2


@pytest.mark.slow
def test_a_budget_that_holds_nothing_is_exit_2(capsys):
    assert app.main([*SMALL, "gpu=8gb", "gpu.memory_gib=0.0001"]) == EXIT_NOTHING_RUN
    assert "Not even one sample fits" in capsys.readouterr().err


def test_a_row_is_a_peak_or_out_of_memory():
    assert app.row_of(Probe(2048, Peak(GIB, GIB))) == "micro-batch 2,048: peak 1.0 GiB"
    assert app.row_of(Probe(128, None)) == "micro-batch 128: out of memory"


@pytest.mark.simulated(mib=2)
def test_a_card_that_does_not_even_take_the_model_is_said(capsys):
    assert cli.main(["fit", *SMALL]) == 3
    assert "\nCUDA out of memory." in capsys.readouterr().err


@pytest.mark.simulated
def test_what_it_runs_on_is_said_where_that_is_not_what_one_would_think(capsys):
    assert app.main([*SMALL, "workload.effective_batch_size=16"]) == 0
    assert "Warning: The GPU is simulated" in capsys.readouterr().err
