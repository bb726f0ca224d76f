"""Which order goes to which machine of a Ray cluster; a real one is in tests/end_to_end/test_sweep_elsewhere.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.kit.fake_ray import FakeRay
from tests.study.clusters.test_keeper import settings
from wellfed.study.clusters import ray_cluster
from wellfed.study.clusters.cluster import ClusterLost, Ended, Order
from wellfed.study.clusters.ray_cluster import RayCluster

BIG, SMALL, PLAIN = {"CPU": 16.0, "GPU": 4.0}, {"CPU": 4.0, "GPU": 1.0}, {"CPU": 4.0}


class OrdersOfRay:
    """Has orders done, and keeps what came of them."""

    def __init__(self, folder: Path, fake: FakeRay) -> None:
        self.fake, self.said, self.ended = fake, [], {}
        self.cluster = RayCluster({"address": "auto"}, {})
        self.cluster.open(settings(folder), self.said.append)

    def run(self, orders: Sequence[Order], *, alone: bool = False) -> list[str]:
        """Keys in the order in which they ended."""
        before = len(self.ended)
        for each in self.cluster.run(orders, alone=alone):
            if isinstance(each, Ended):
                self.ended[each.key] = each.told
        return list(self.ended)[before:]


@pytest.fixture
def of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., OrdersOfRay]:
    """A cluster of machines: ``of(a=BIG)``."""
    monkeypatch.setattr(ray_cluster, "_TICK_S", 0)
    monkeypatch.setattr(ray_cluster, "_NODES_S", 0)

    def make(**machines: dict[str, float]) -> OrdersOfRay:
        fake = FakeRay(machines)
        fake.installed(monkeypatch)
        return OrdersOfRay(tmp_path, fake)

    return make


@pytest.mark.parametrize(
    ("address", "runs_here", "is_started"),
    [(None, False, True), (None, True, False), ("auto", False, False), ("local", True, True)],
)
def test_only_a_cluster_that_it_starts_itself_has_a_store_of_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str | None, runs_here: bool, is_started: bool
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray_cluster, "_runs_here", lambda: runs_here)
    fake = FakeRay({"a": PLAIN})
    fake.installed(monkeypatch)
    RayCluster({"address": address}, {}).open(settings(tmp_path), print)
    assert fake.begun_with["address"] == address
    assert ("object_store_memory" in fake.begun_with) is is_started


def test_a_machine_has_as_many_at_a_time_as_gpus_and_each_has_its_share(of: Callable[..., OrdersOfRay]) -> None:
    cluster = of(a=BIG, b=SMALL)
    assert cluster.cluster.most_gpus == 4
    cluster.run([Order(str(number), b"9", num_gpus=1) for number in range(10)])
    assert len(cluster.ended) == 10
    assert max(len(here) for name, here in cluster.fake.together() if name == "a") == 4
    assert max(len(here) for name, here in cluster.fake.together() if name == "b") == 1
    assert {(actor.options["num_cpus"], actor.options["num_gpus"]) for actor in cluster.fake.made} == {(4, 1)}
    assert len(cluster.fake.made) == 5  # kept for the next order


def test_without_gpus_a_machine_is_for_one(of: Callable[..., OrdersOfRay]) -> None:
    cluster = of(a=PLAIN, b=PLAIN)
    assert cluster.cluster.most_gpus == 0
    cluster.run([Order(str(number), b"3") for number in range(6)])
    assert {len(here) for _, here in cluster.fake.together()} == {1}
    assert {told.host for told in cluster.ended.values()} == {"a", "b"}
    assert {actor.options["num_cpus"] for actor in cluster.fake.made} == {4}


@pytest.mark.parametrize("sizes", [(1, 2, 4, 1, 2), (4, 1, 1, 1, 2), (2, 2, 1, 4), (1, 0, 2)], ids=str)
def test_orders_of_several_sizes_are_all_done(of: Callable[..., OrdersOfRay], sizes: tuple[int, ...]) -> None:
    cluster = of(a=BIG)
    cluster.run([Order(str(number), b"2", num_gpus=size) for number, size in enumerate(sizes)])
    assert sorted(cluster.ended) == [str(number) for number in range(len(sizes))]
    assert not [told.problem for told in cluster.ended.values() if told.answer is None]


def test_an_order_that_waits_for_its_machine_keeps_no_other_waiting(of: Callable[..., OrdersOfRay]) -> None:
    cluster = of(a=PLAIN, b=PLAIN)
    only = {name: frozenset([name]) for name in "ab"}
    orders = [Order(f"a{number}", b"5", hosts=only["a"]) for number in range(3)]
    ended = cluster.run([*orders, Order("b", b"5", hosts=only["b"])], alone=True)
    assert ended.index("b") <= 1
    assert {key: told.host for key, told in cluster.ended.items()} == {"a0": "a", "a1": "a", "a2": "a", "b": "b"}


def test_an_order_that_no_machine_can_do_keeps_no_other_waiting(
    of: Callable[..., OrdersOfRay], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = of(a=SMALL)
    monkeypatch.setattr(ray_cluster, "_WAIT_S", 0)
    gone = Order("gone", b"1", num_gpus=1, hosts=frozenset(["c"]))
    with pytest.raises(ClusterLost, match="no machine of the cluster could do what is left"):
        cluster.run([gone, Order("first", b"2", num_gpus=1), Order("second", b"2", num_gpus=1)])
    assert list(cluster.ended) == ["first", "second"]


def test_one_at_a_time_on_a_machine_where_it_is_asked_for(of: Callable[..., OrdersOfRay]) -> None:
    cluster = of(a=BIG)
    cluster.run([Order(str(number), b"3", num_gpus=1) for number in range(4)])
    cluster.fake.ran.clear()
    cluster.run([Order(f"again{number}", b"3", num_gpus=1) for number in range(4)], alone=True)
    assert {len(here) for _, here in cluster.fake.together()} == {1}


def test_a_process_that_is_lost_costs_its_order_alone(of: Callable[..., OrdersOfRay]) -> None:
    cluster = of(a=PLAIN)
    cluster.run([Order("lost", b"lost"), Order("next", b"1")])
    assert cluster.ended["lost"].answer is None
    assert cluster.ended["lost"].problem.startswith("its worker process was killed")
    assert cluster.ended["next"].answer == b"1"
    assert len(cluster.fake.made) == 2
    cluster.cluster.close()
    assert cluster.fake.actors == []
