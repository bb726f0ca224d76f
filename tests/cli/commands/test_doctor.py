import io
import json
import os
import subprocess
import sys
from pathlib import Path

import wellfed
from wellfed.cli.commands import doctor
from wellfed.cli.commands.doctor import show, surroundings
from wellfed.observe.hardware.torch_cuda import TorchCuda
from wellfed.observe.machine_facts import GpuFacts, MachineFacts
from wellfed.plan.doctor_checks import Surroundings, examine

WITH_SOURCE = {**os.environ, "PYTHONPATH": str(Path(wellfed.__file__).parents[1])}

H200 = GpuFacts(0, "GPU-bbbb", "NVIDIA H200", 139.8, "9.0", 139.0, nvml_index=0)
WELL = Surroundings(has_wandb_login=True, has_compiler=True)


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
    found = examine(machine, Surroundings(False, False))
    assert [entry.what for entry in found.missing] == ["torch", "shm", "wandb", "compiler"]
    assert shown(found).startswith(
        "torch can't use NVIDIA H200 (139.8 GiB): torch 2.13.0+cpu is built without CUDA. Training would run on the "
        "CPU. Install the build for this driver: https://pytorch.org/get-started/locally\n"
    )
    assert (found.profile.profile, found.precision) == ("cpu", "32-true")


def test_warnings_of_the_facts_are_listed():
    (entry,) = examine(facts(H200, warnings=("NVML: the cards differ [x]",)), WELL).missing
    assert entry.problem == "NVML: the cards differ [x]"
    assert "warning: NVML: the cards differ [x]" in shown(examine(facts(H200, warnings=(entry.problem,)), WELL))


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
