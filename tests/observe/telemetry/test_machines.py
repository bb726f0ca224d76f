from hypothesis import given
from hypothesis import strategies as st

from wellfed.observe.telemetry.machines import HOST, is_host, label_of, named, numbered, of_node
from wellfed.observe.telemetry.metrics import prefix

nodes, gpus = st.integers(0, 5000), st.integers(0, 63)


@given(node=nodes, gpu=gpus | st.just(HOST))
def test_each_gpu_and_host_has_a_number_and_a_name_of_its_own(node, gpu):
    number = of_node(node, gpu)
    assert is_host(number) == (gpu == HOST)
    assert named(number) == (gpu if node == 0 else f"node{node}/{gpu}")
    assert numbered(f"1.5,3,train,{named(number)},50.0\n".encode()) == f"1.5,3,train,{number},50.0\n".encode()


def test_curves_of_other_machines_are_named_so():
    assert [prefix(of_node(node, gpu)) for node in (0, 2) for gpu in (HOST, 3)] == [
        "host",
        "gpu3",
        "node2/host",
        "node2/gpu3",
    ]
    assert (label_of({"index": 1}), label_of({"index": 1, "node": 2, "host": "b"})) == ("1", "node2/1")
