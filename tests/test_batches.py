import dataclasses
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wellfed import batches


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any
    name: str = "name"
    twice: Any = dataclasses.field(init=False, default=None)

    def __post_init__(self):
        object.__setattr__(self, "twice", self.x)


def nested(size=6):
    x, y = torch.arange(size), torch.arange(size * 2).view(size, 2)
    return {"a": (x, [y, "text"]), "b": Pair(x, None), "c": Frozen(y), "d": OrderedDict(z=x)}


def same(one, two):
    assert type(one) is type(two)
    assert str(one) == str(two)


def test_every_layout_keeps_its_type_and_what_is_no_tensor():
    batch = nested()
    same(batches.map_tensors(batch, lambda tensor: tensor.clone()), batch)
    doubled = batches.map_tensors(batch, lambda tensor: tensor * 2)
    same(doubled["b"], Pair(torch.arange(6) * 2, None))
    assert doubled["c"].twice.equal(doubled["c"].x)
    assert batch["b"].x.equal(torch.arange(6))


def test_all_tensors_are_found():
    assert [tensor.dim() for tensor in batches.tensors(nested())] == [1, 2, 1, 2, 2, 1]
    assert list(batches.tensors(Frozen)) == []  # the class itself is no batch


def test_size_and_bytes():
    assert batches.batch_size(nested()) == 6
    assert batches.num_bytes([torch.zeros(3, 4), torch.zeros(3, dtype=torch.uint8)]) == 51


@pytest.mark.parametrize(
    ("batch", "found"),
    [
        ((torch.zeros(3), torch.zeros(4)), "(3,), (4,)"),
        (torch.tensor(1.0), "()"),
        ((torch.zeros(3), torch.tensor(1.0)), "(3,), ()"),
        ({"a": 1}, "no tensors"),
    ],
)
def test_what_shares_no_first_dimension_is_refused_with_its_shapes(batch, found):
    with pytest.raises(TypeError) as caught:
        batches.batch_size(batch)
    assert f"this one has {found}. Give the training data split(batch, sizes)" in str(caught.value)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_parts_put_together_are_the_batch_and_share_its_memory(sizes):
    batch = nested(sum(sizes))
    parts = batches.split(batch, sizes)
    assert [batches.batch_size(part) for part in parts] == sizes
    for number, whole in enumerate(batches.tensors(batch)):
        pieces = [list(batches.tensors(part))[number] for part in parts]
        assert torch.cat(pieces).equal(whole)
        assert pieces[0].data_ptr() == whole.data_ptr()


def test_texts_of_samples_go_with_their_parts():
    batch = {"x": torch.arange(3), "names": ["a", "b", "c"], "classes": ["cat", "dog"], "size": [2, 3, 4]}
    first, second = batches.split(batch, [1, 2])
    assert (first["names"], second["names"]) == (["a"], ["b", "c"])
    assert second["classes"] == ["cat", "dog"]
    assert second["size"] == [2, 3, 4]


def test_to_device_goes_through_every_tensor():
    moved = batches.to_device(nested(), torch.device("meta"))
    assert {tensor.device.type for tensor in batches.tensors(moved)} == {"meta"}
