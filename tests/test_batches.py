import collections.abc
import dataclasses
from collections import Counter, OrderedDict, UserDict, defaultdict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import default_collate

from wellfed import batches
from wellfed.errors import DataError


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


def test_all_that_has_an_entry_for_each_sample_is_cut_with_it():
    size = 3
    batch = {
        "x": torch.arange(size),
        "texts": ("a", "b", "c"),
        "ids": [7, 8, 9],
        "array": np.arange(6).reshape(3, 2),
        "boxes": [{"box": [1, 2]}, {"box": [3, 4]}, {"box": []}],
        "tokens": [[1], [2, 3], [4, 5, 6, 7]],
        "frozen": Frozen(["u", "v", "w"]),
        "pair": Pair(torch.ones(size), ("p", "q", "r")),
        "fields": [("d", "e", "f"), ("g", "h", "i")],
        "user": UserDict(rows=[None, 1.5, "z"]),
        "split": "train",
        "none": None,
        "flag": True,
    }
    first, second = batches.split(batch, [1, 2])
    assert second["texts"] == ("b", "c")
    assert (first["ids"], second["ids"]) == ([7], [8, 9])
    assert second["array"].tolist() == [[2, 3], [4, 5]]
    assert second["boxes"] == [{"box": [3, 4]}, {"box": []}]
    assert second["tokens"] == [[2, 3], [4, 5, 6, 7]]
    assert first["frozen"] == Frozen(["u"])
    assert type(second["pair"]) is Pair
    assert second["pair"].y == ("q", "r")
    assert second["fields"] == [("e", "f"), ("h", "i")]
    assert second["user"]["rows"] == [1.5, "z"]
    assert (second["split"], second["none"], second["flag"]) == ("train", None, True)


@pytest.mark.parametrize("collated", [False, True])
def test_a_pair_of_tensors_in_a_batch_of_two_is_a_container(collated):
    samples = [(torch.tensor([1.0]), "a", 3), (torch.tensor([2.0]), "b", 4)]
    batch = default_collate(samples) if collated else (torch.tensor([[1.0], [2.0]]), ("a", "b"), torch.tensor([3, 4]))
    first, second = batches.split(batch, [1, 1])
    assert [list(one) for one in (first, second)] == [
        [torch.tensor([[1.0]]), ("a",), torch.tensor([3])],
        [torch.tensor([[2.0]]), ("b",), torch.tensor([4])],
    ]


def test_what_default_collate_makes_is_cut_as_its_samples_lie():
    samples = [{"x": torch.tensor(i), "text": f"t{i}", "pair": (f"u{i}", i), "nested": [f"v{i}"]} for i in range(5)]
    parts = batches.split(default_collate(samples), [2, 3])
    for part, own in zip(parts, (samples[:2], samples[2:]), strict=True):
        assert str(part) == str(default_collate(own))


class Opaque:
    pass


@pytest.mark.parametrize(
    ("member", "said"),
    [
        (["cat", "dog"], "list of 2 str"),
        (("cat", "dog"), "tuple of 2 str"),
        (Opaque(), "Opaque"),
        (17, "int,"),
        (np.zeros((2, 3)), "[2, 3] float64 (ndarray)"),
        (np.zeros(()), "[] float64 (ndarray)"),
        ({"a", "b", "c"}, "set,"),
        ([("a", "b", "c")] * 3, "list(tuple of 3 str, tuple of 3 str, tuple of 3 str): one entry a sample"),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name(member, said):
    batch = {"x": torch.zeros(3), "inner": [torch.zeros(3), Frozen({"it": member})]}
    with pytest.raises(DataError) as caught:
        batches.split(batch, [1, 2])
    message = str(caught.value)
    assert message.startswith(f"batch['inner'][1].x['it'] can't be cut into micro-batches: it is {said}")
    assert "split(batch, sizes)" in message
    assert "memory.micro_batch=3 memory.on_oom=fail" in message


def test_a_list_of_one_sample_is_cut_whatever_it_holds():
    assert batches.split({"x": torch.zeros(1), "tokens": [[7]]}, [1])[0]["tokens"] == [[7]]


class Custom(collections.abc.Mapping):
    def __init__(self, items):
        self._items = dict(items)

    def __getitem__(self, key):
        return self._items[key]

    def __iter__(self):
        return iter(self._items)

    def __len__(self):
        return len(self._items)


@dataclasses.dataclass(init=False)
class Initless:
    x: Any

    def __init__(self, first, second):
        self.x = first + second


@dataclasses.dataclass
class WithInitVar:
    x: Any
    scale: dataclasses.InitVar[int]

    def __post_init__(self, scale):
        self.x = self.x * scale


def containers():
    one = torch.ones(2)
    yield OrderedDict(a=one)
    yield defaultdict(list, a=one)
    yield Counter(a=one)
    yield UserDict(a=one)
    yield Custom({"a": one})
    yield Pair(one, "text")
    yield Initless(one, one)
    yield WithInitVar(one, 3)


@pytest.mark.parametrize("container", list(containers()), ids=lambda one: type(one).__name__)
def test_any_container_is_pinned_moved_and_cut(container):
    (tensor,) = batches.tensors(container)
    mapped = batches.map_tensors(container, lambda found: found + 1)
    assert type(mapped) is type(container)
    assert next(batches.tensors(mapped)).equal(tensor + 1)
    assert next(batches.tensors(container)) is tensor
    first, _ = batches.split(container, [1, 1])
    assert type(first) is type(container)
    assert next(batches.tensors(first)).equal(tensor[:1])


def test_a_defaultdict_keeps_its_default():
    batch = defaultdict(list, x=torch.ones(2))
    assert batches.map_tensors(batch, lambda tensor: tensor).default_factory is list


def test_a_batch_encoding_of_transformers_is_a_batch():
    batch = pytest.importorskip("transformers").BatchEncoding({"ids": torch.arange(4), "texts": list("abcd")})
    first, second = batches.split(batches.to_device(batch, torch.device("cpu")), [1, 3])
    assert type(second) is type(batch)
    assert (first["texts"], second["ids"].tolist()) == (["a"], [1, 2, 3])


def test_samples_are_repeated_with_their_texts():
    batch = {"x": torch.arange(2), "texts": ("a", "b"), "array": np.arange(2)}
    made = batches.repeated(batch, 5)
    assert (made["x"].tolist(), made["texts"], made["array"].tolist()) == (
        [0, 1, 0, 1, 0],
        tuple("ababa"),
        [0, 1, 0, 1, 0],
    )
    assert batches.repeated({"x": torch.arange(2), "n": 3}, 3)["n"] == 3


def test_to_device_goes_through_every_tensor():
    moved = batches.to_device(nested(), torch.device("meta"))
    assert {tensor.device.type for tensor in batches.tensors(moved)} == {"meta"}
