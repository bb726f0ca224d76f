from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wellfed.config.schema import TrainerConfig
from wellfed.plan.nodes import NodeCards, RankFacts, card_faults, code_faults, launch_faults
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


def test_one_machine_needs_no_launcher():
    assert not list(launch_faults(trainer(1, 8), None))


FIRST = RankFacts(0, 0, "a", "0123456789abcdef", "clean", "source", (("torch", "2.13"), ("lightning", "2.6")))


@pytest.mark.parametrize(
    ("differs", "said"),
    [
        ({"commit": "fedcba9876543210"}, "rank 0 on node 0 (a) runs commit 0123456789, rank 3 on node 1 (b) commit fe"),
        ({"commit": None}, "rank 3 on node 1 (b) no checkout of git"),
        ({"change": "other"}, "what is not committed differs between rank 0 on node 0 (a) and rank 3 on node 1 (b)."),
        ({"source": "other"}, "source files differ"),
        ({"versions": (("torch", "2.12"), ("lightning", "2.6"))}, "(a) has torch 2.13, rank 3 on node 1 (b) 2.12."),
        ({"versions": (("lightning", "2.6"),)}, "(a) has torch 2.13, rank 3 on node 1 (b) none."),
        ({}, None),
    ],
    ids=["commit", "no git", "change", "source", "version", "not installed", "same"],
)
def test_all_ranks_run_the_same_code(differs, said):
    ranks = [FIRST, replace(FIRST, rank=1), replace(FIRST, rank=3, node=1, host="b", **differs)]
    found = [str(fault) for fault in code_faults(ranks)]
    assert len(found) == (said is not None)
    assert said is None or said in found[0]


A = NodeCards(0, "a", "gpu", (("H200", 139.8), ("H200", 139.8)))


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (NodeCards(1, "b", "gpu", (("H200", 139.8), ("H200", 139.8))), None),
        (NodeCards(1, "b", "gpu", (("H200", 139.8), ("L4", 22.0))), "(b) has 1 x H200 (140 GiB), 1 x L4 (22 GiB)"),
        (NodeCards(1, "b", "gpu", (("H200", 70.0), ("H200", 70.0))), "has 2 x H200 (140 GiB), node 1 (b) has 2 x H200"),
        (NodeCards(1, "b", "cpu", ()), "node 0 (a) trains on its GPUs, node 1 (b) on none that torch can use."),
    ],
    ids=["same", "one other", "other memory", "no GPU"],
)
def test_machines_train_on_the_same_cards(other, said):
    found = [str(fault) for fault in card_faults([A, replace(A, node=2), other])]
    assert len(found) == (said is not None)
    assert said is None or said in found[0]
