import pytest
from hypothesis import given
from hypothesis import strategies as st

from wellfed.config.schema import TrainerConfig
from wellfed.plan.nodes import launch_faults
from wellfed.ranks import Launch

counts = st.integers(1, 4)


def launch(num_nodes=2, devices=2, by="torchrun", **more):
    given = {"rank": 0, "local_rank": 0, "node": 0, "world_size": num_nodes * devices, "num_nodes": num_nodes}
    return Launch(by, **{**given, "devices": devices, **more})


def trainer(num_nodes=2, devices=2):
    return TrainerConfig(num_nodes=num_nodes, devices=devices)


@given(nodes=counts, devices=counts, started_nodes=counts, started_devices=counts)
def test_what_was_started_must_be_what_is_asked_for(nodes, devices, started_nodes, started_devices):
    found = list(launch_faults(trainer(nodes, devices), launch(started_nodes, started_devices)))
    assert bool(found) == ((nodes, devices) != (started_nodes, started_devices))
    for fault in found:
        assert f"trainer.num_nodes={started_nodes} trainer.devices={started_devices}" in str(fault)
        assert f"--nnodes={nodes} --nproc-per-node={devices}" in str(fault)


@pytest.mark.parametrize(
    ("asked", "started", "said"),
    [
        (
            trainer(),
            launch(1, 2),
            "trainer.num_nodes=2: with trainer.devices=2 these are 4 ranks (2 x 2), and torchrun has started 2 "
            "(1 x 2). Set trainer.num_nodes=1 trainer.devices=2, or start it with --nnodes=2 --nproc-per-node=2.",
        ),
        (
            trainer(2, 1),
            launch(2, 2, world_size=3, by="srun"),
            "trainer.num_nodes=2: with trainer.devices=1 these are 2 ranks (2 x 1), and srun has started 3 (not "
            "equally many on each of 2). Start it with --nodes=2 --ntasks-per-node=1.",
        ),
        (
            trainer(),
            None,
            "trainer.num_nodes=2: this process was started alone: nobody starts the ranks of the other machines. Start "
            "it on each of them: torchrun --nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d "
            "--rdzv-endpoint=<first machine>:29500 src/train.py ...; or by srun.",
        ),
    ],
    ids=["fewer nodes", "not equally many", "alone"],
)
def test_other_numbers_are_refused_with_both(asked, started, said):
    (fault,) = launch_faults(asked, started)
    assert str(fault) == said
