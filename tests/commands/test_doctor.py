import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import wellfed
from wellfed.commands import doctor
from wellfed.commands.doctor import Surroundings, examine, show, surroundings
from wellfed.hardware.facts import GpuFacts, MachineFacts
from wellfed.hardware.torch_cuda import TorchCuda

WITH_SOURCE = {**os.environ, "PYTHONPATH": str(Path(wellfed.__file__).parents[1])}

H200 = GpuFacts(0, "GPU-bbbb", "NVIDIA H200", 139.8, "9.0", 139.0, nvml_index=0)
WELL = Surroundings(has_wandb_login=True, has_compiler=True, unofficial_pynvml=None)


def facts(*gpus, **fields):
    defaults = {"nvml_problem": None if gpus else "driver not loaded", "shm_gib": 8.0, "shm_free_gib": 7.5}
    return MachineFacts("A CPU", 2.5, 16.0, 12.0, gpus=gpus, **{**defaults, **fields})


def shown(examination):
    stream = io.StringIO()
    show(examination, stream)
    return stream.getvalue()


def test_a_healthy_machine_misses_nothing():
    found = examine(facts(H200), WELL)
    assert found.missing == ()
    assert (found.profile.profile, found.precision) == ("80gb", "bf16-mixed")
    text = shown(found)
    for part in ["A CPU, 2.5 cores", "gpu 0", "NVIDIA H200 (139.8 GiB), 139.0 free", "Nothing is missing."]:
        assert part in text
    assert "gpu=80gb: 125.1 GiB to plan with, bf16-mixed" in text


def test_a_card_that_torch_cannot_use_is_said_first():
    machine = facts(H200, torch_problem="torch 2.13.0+cpu is built without CUDA", shm_gib=0.06, shm_free_gib=0.06)
    found = examine(machine, Surroundings(False, False, "pynvml 11 is in the way"))
    assert [entry.what for entry in found.missing] == ["torch", "shm", "pynvml", "wandb", "compiler"]
    assert shown(found).startswith(
        "torch can't use NVIDIA H200 (139.8 GiB): torch 2.13.0+cpu is built without CUDA. Training would run on the "
        "CPU. Install the build for this driver: https://pytorch.org/get-started/locally\n"
    )
    assert (found.profile.profile, found.precision) == ("cpu", "32-true")


def test_no_gpu_is_listed_once_with_the_way_out():
    (entry,) = examine(facts(torch_problem="torch 2.13.0+cpu is built without CUDA"), WELL).missing
    assert entry.what == "gpu"
    assert entry.problem == "no NVIDIA GPU here (NVML: driver not loaded); training runs on the CPU."
    assert "--gpus all" in entry.way_out


@pytest.mark.parametrize(
    ("problem", "way_out"),
    [
        ("none of 1 is visible (CUDA_VISIBLE_DEVICES='')", "Run: unset CUDA_VISIBLE_DEVICES"),
        ("driver and library versions differ, reboot to load the new driver", ""),
        ("nvidia-ml-py is not installed (pip install nvidia-ml-py)", ""),
    ],
)
def test_the_way_to_the_gpu_follows_the_reason(problem, way_out):
    (entry,) = examine(facts(nvml_problem=problem), WELL).missing
    assert problem in entry.problem
    assert entry.way_out == way_out


def test_cards_that_are_hidden_are_said_also_without_nvml():
    problem = "torch finds no usable GPU with CUDA_VISIBLE_DEVICES=7"
    (entry,) = examine(facts(nvml_problem="library not found", torch_problem=problem), WELL).missing
    assert entry.problem == f"no NVIDIA GPU here (NVML: library not found; {problem}); training runs on the CPU."
    assert entry.way_out == "Run: unset CUDA_VISIBLE_DEVICES"


def test_no_torch_is_missing_also_without_a_gpu():
    missing = examine(facts(torch_problem="torch can't be imported (No module named 'torch')"), WELL).missing
    assert [entry.what for entry in missing] == ["torch", "gpu"]
    assert missing[0].problem.startswith("torch can't be used: torch can't be imported (No module")


def test_a_small_shm_names_its_size_and_the_option():
    (entry,) = examine(facts(H200, shm_gib=0.0625, shm_free_gib=0.0625), WELL).missing
    assert entry.problem.startswith("/dev/shm has 64.0 MiB")
    assert "--shm-size=8g" in entry.way_out
    assert examine(facts(H200, shm_gib=None, shm_free_gib=None), WELL).missing == ()
    assert examine(facts(H200, shm_gib=1.0), WELL).missing == ()


def test_warnings_of_the_facts_are_listed():
    (entry,) = examine(facts(H200, warnings=("NVML: the cards differ [x]",)), WELL).missing
    assert entry.problem == "NVML: the cards differ [x]"
    assert "warning: NVML: the cards differ [x]" in shown(examine(facts(H200, warnings=(entry.problem,)), WELL))


def test_software_has_ways_out_to_type():
    missing = examine(facts(H200), Surroundings(False, False, "Run: pip uninstall pynvml")).missing
    assert [entry.what for entry in missing] == ["pynvml", "wandb", "compiler"]
    assert "pip uninstall pynvml" in missing[0].problem
    assert "wandb login" in missing[1].way_out
    assert "g++" in missing[2].way_out


def test_json_is_machine_profile_missing():
    recorded = json.loads(json.dumps(examine(facts(H200), WELL).to_dict()))
    assert list(recorded) == ["machine", "profile", "missing"]
    assert recorded["machine"]["gpus"][0]["uuid"] == "GPU-bbbb"
    assert recorded["profile"]["name"] == "80gb"
    assert recorded["profile"]["budget_gib"] == pytest.approx(125.1)
    assert recorded["profile"]["precision"] == "bf16-mixed"
    recorded = examine(facts(), WELL).to_dict()
    assert recorded["missing"][0].keys() == {"what", "problem", "way_out"}


def test_main_prints_either_form(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "torch_cuda", lambda: TorchCuda(problem="asked"))
    monkeypatch.setattr(doctor, "surroundings", lambda environ, home: WELL)
    monkeypatch.setattr(doctor, "machine", lambda torch: facts(torch_problem=torch.problem))
    assert doctor.main(["--json"]) == 0
    assert json.loads(capsys.readouterr().out)["machine"]["torch_problem"] == "asked"
    assert doctor.main([]) == 0
    assert "Missing:" in capsys.readouterr().out


def test_the_login_is_asked_of_the_environment_and_the_home_it_is_given(tmp_path):
    assert not surroundings({"PATH": ""}, tmp_path).has_wandb_login
    assert surroundings({"PATH": "", "WANDB_API_KEY": "k"}, tmp_path).has_wandb_login


def test_the_compiler_is_looked_for_on_the_path(tmp_path):
    assert not surroundings({"PATH": str(tmp_path)}, tmp_path).has_compiler
    compiler = tmp_path / "g++"
    compiler.write_text("")
    compiler.chmod(0o755)
    assert surroundings({"PATH": str(tmp_path)}, tmp_path).has_compiler
    assert not surroundings({"PATH": str(tmp_path), "CXX": "icpx"}, tmp_path).has_compiler


def test_help_needs_no_torch():
    code = (
        "import sys, runpy, contextlib\n"
        "sys.argv = ['wellfed', 'doctor', '--help']\n"
        "with contextlib.suppress(SystemExit): runpy.run_module('wellfed', run_name='__main__')\n"
        "print([n for n in ('torch', 'lightning', 'hydra', 'wandb', 'rich') if n in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=WITH_SOURCE)
    assert "--json" in done.stdout
    assert done.stdout.strip().endswith("[]")
    assert done.stderr == ""
