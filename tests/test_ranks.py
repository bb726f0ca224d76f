import pytest

from wellfed.ranks import Launch, launched, own_local_rank, requeue

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "mine",
    "RANK": "5",
    "LOCAL_RANK": "1",
    "GROUP_RANK": "2",
    "WORLD_SIZE": "6",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_WORLD_SIZE": "3",
    "TORCHELASTIC_RESTART_COUNT": "1",
}
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_NTASKS": "6",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_NNODES": "3",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_RESTART_COUNT": "1",
}
WHICH = {"rank": 5, "local_rank": 1, "node": 2, "world_size": 6, "num_nodes": 3, "devices": 2, "attempt": 1}


@pytest.mark.parametrize(
    ("environ", "launch"),
    [
        (TORCHRUN, Launch("torchrun", **WHICH, job="torchrun mine")),
        (SLURM, Launch("srun", **WHICH, job="slurm 77")),
        ({**SLURM, **TORCHRUN}, Launch("torchrun", **WHICH, job="torchrun mine")),
        ({**SLURM, "SLURM_JOB_NAME": "interactive"}, None),
        ({**TORCHRUN, "TORCHELASTIC_RUN_ID": "none"}, Launch("torchrun", **WHICH)),
        ({"LOCAL_RANK": "1", "WORLD_SIZE": "2"}, None),  # as Lightning starts them
        ({}, None),
    ],
    ids=["torchrun", "srun", "torchrun within srun", "a shell of Slurm's", "without a name", "Lightning", "alone"],
)
def test_a_launcher_is_known_by_what_it_writes(environ, launch):
    assert launched(environ) == launch


@pytest.mark.parametrize(("environ", "number"), [(TORCHRUN, 1), (SLURM, 1), ({"LOCAL_RANK": "3"}, 3), ({}, 0)], ids=str)
def test_a_rank_has_the_card_of_its_number_on_its_machine(environ, number):
    assert own_local_rank(environ) == number


@pytest.mark.parametrize(("more", "job"), [({}, "7"), ({"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "2"}, "5_2")])
def test_slurm_is_asked_to_queue_the_job_again(tmp_path, monkeypatch, more, job):
    asked, scontrol = tmp_path / "asked", tmp_path / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {asked}\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    environ = {"SLURM_NTASKS": "1", "SLURM_JOB_ID": "7", **more}
    assert requeue(environ) is None
    assert asked.read_text() == f"requeue {job}\n"
    assert requeue({}) is None  # nothing of Slurm's
    assert asked.read_text() == f"requeue {job}\n"
    scontrol.write_text("#!/bin/sh\necho no such job >&2; exit 1\n")
    assert requeue(environ) == f"scontrol requeue {job}: no such job\n"
    scontrol.unlink()
    assert "scontrol" in requeue(environ)
