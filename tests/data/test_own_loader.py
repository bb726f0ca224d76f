"""A user's loader gives the batches, in the order, that it gives in a plain loop of PyTorch's, and goes on there."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from tests.kit import own_loaders as given
from tests.kit.few import slow
from tests.kit.gloo_ranks import join, leave, of_ranks
from tests.kit.own_loaders import LOADERS
from wellfed import generators
from wellfed.data.own_loader import OwnEvalLoader, OwnLoader, first_batch, step_size
from wellfed.data.rank_batches import shared_out
from wellfed.errors import ConfigError, DataError

EPOCHS, SEED = 3, 4
SLOW = {"worker_init_fn", "workers that stay", "a stream with workers", "last left out", "a generator, last left out"}
by_loader = pytest.mark.parametrize("name", [slow(name) if name in SLOW else name for name in LOADERS])


def plainly(name: str) -> list[list[Any]]:
    """The epochs of a plain loop, which calls ``set_epoch`` as Lightning does."""
    generators.seed_all(SEED)
    loader = LOADERS[name]()
    found = []
    for epoch in range(EPOCHS):
        for one in (getattr(loader, "sampler", None), getattr(loader, "dataset", None)):
            if hasattr(one, "set_epoch"):
                one.set_epoch(epoch)
        found.append([batch.tolist() for batch in loader])
    return found


@by_loader
def test_its_batches_are_those_of_a_plain_loop(name: str) -> None:
    expected = plainly(name)
    generators.seed_all(SEED)
    loader = OwnLoader(LOADERS[name]())
    found = [[one for one in loader] for _ in range(EPOCHS)]  # noqa: C416  list() asks for the length
    assert [[one.batch.tolist() for one in epoch] for epoch in found] == expected
    for number, epoch in enumerate(found):
        assert [(one.epoch, one.index) for one in epoch] == [(number, index) for index in range(len(epoch))]
        assert [one.is_last for one in epoch] == [False] * (len(epoch) - 1) + [True]
        assert [one.total for one in epoch] == [len(one.batch) for one in epoch]
    loader.close()


@by_loader
def test_it_goes_on_where_it_was_left(name: str) -> None:
    if name == "an iterable":
        pytest.skip("its epochs depend on how often it was read, which nobody can restore")
    # Workers that stay draw on from epoch to epoch, and new ones begin anew.
    width = 1 if name == "workers that stay" else None

    def seen_of(batch: list[Any]) -> list[Any]:
        return [row[:width] if isinstance(row, list) else row for row in batch]

    epochs = plainly(name)
    expected = [seen_of(batch) for epoch in epochs for batch in epoch]
    end = len(epochs[0])
    for stops in ((1,), (end, end + 1), (len(expected) // 2,), (len(expected) - 2,)):
        seen, saved = list[Any](), None
        for stop in (*stops, len(expected)):
            generators.seed_all(SEED if saved is None else 99)
            loader = OwnLoader(LOADERS[name]())
            if saved is not None:
                loader.load_state_dict(saved["position"])
                generators.restore(saved["drawn"])
            while len(seen) < stop:
                for one in loader:
                    seen.append(seen_of(one.batch.tolist()))
                    if len(seen) == stop:
                        break
            saved = _through_a_file({"position": loader.state_dict(), "drawn": generators.state()})
            loader.close()
        assert seen == expected, stops


def test_a_batch_that_was_read_ahead_is_drawn_again_as_it_was() -> None:
    def trained(loader: OwnLoader, steps: int) -> list[Any]:
        """The batches of steps that draw from the same generators."""
        seen: list[Any] = []
        while len(seen) < steps:
            for one in loader:
                seen.append((one.batch.tolist(), torch.rand(1).item()))
                if len(seen) == steps:
                    break
        return seen

    name = "samples that draw, of unknown number"
    generators.seed_all(SEED)
    expected = trained(OwnLoader(LOADERS[name]()), 12)
    for stop in (2, 6, 9):
        generators.seed_all(SEED)
        loader = OwnLoader(LOADERS[name]())
        seen = trained(loader, stop)
        saved = _through_a_file({"position": loader.state_dict(), "drawn": generators.state()})
        generators.seed_all(99)
        again = OwnLoader(LOADERS[name]())
        again.load_state_dict(saved["position"])
        generators.restore(saved["drawn"])
        assert seen + trained(again, 12 - stop) == expected, stop


def test_a_position_that_it_stands_at_already_changes_no_generator() -> None:
    """A prefetcher loads it before each epoch, and a validation in between may have drawn."""
    orders = []
    for is_loaded in (False, True):
        loader = OwnLoader(own := LOADERS["a generator"]())
        orders += [[one.batch.tolist() for one in loader]]
        position = loader.state_dict()
        torch.rand(1, generator=own.generator)
        if is_loaded:
            loader.load_state_dict(position)
        orders += [[one.batch.tolist() for one in loader]]
    assert orders[:2] == orders[2:]
    assert orders[0] != orders[1]


def _through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_a_dataset_with_a_state_is_not_read_again() -> None:
    loader = OwnLoader(DataLoader(given.Stateful(), 4))
    running = iter(loader)
    next(running), next(running)
    dataset = given.Stateful()
    again = OwnLoader(DataLoader(dataset, 4))
    again.load_state_dict(loader.state_dict())
    assert next(iter(again)).batch[0].tolist() == [8.0]
    assert dataset.read == 8  # the batch, and the one that shows whether it was the last


def test_a_limit_ends_the_epoch() -> None:
    loader = OwnLoader(LOADERS["shuffled"](), limit_batches=2)
    assert loader.steps_per_epoch == 2
    assert [(one.epoch, one.index, one.is_last) for _ in range(2) for one in loader] == [
        (epoch, index, index == 1) for epoch in range(2) for index in range(2)
    ]
    assert OwnLoader(LOADERS["an iterable"]()).steps_per_epoch is None


def test_an_evaluation_begins_anew_each_time() -> None:
    loader = OwnEvalLoader(LOADERS["in order"]())
    next(iter(loader))
    assert [[one.batch[0].item() for one in loader] for _ in range(2)] == [[0, 4, 8, 12, 16, 20]] * 2
    assert (len(loader), loader.state_dict()) == (6, {"epoch": 0, "batch": 0})


class Once(IterableDataset):
    """Is empty after its first reading."""

    def __init__(self) -> None:
        self.rows = iter(torch.zeros(4, 1))

    def __iter__(self) -> Any:
        return self.rows


REFUSED = [
    (lambda: (batch for batch in torch.zeros(2, 3)), "generator gave no batch in epoch 1. An epoch is one reading"),
    (lambda: DataLoader(given.Stream(0), 4), "Stream gave no batch in epoch 0"),
    (lambda: DataLoader(given.Stream(3), 4, drop_last=True), "workload.drop_last"),
    (lambda: DataLoader(Once(), 2), "Once gave no batch in epoch 1. An epoch is one reading"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_what_gives_no_epoch_is_an_error(make: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        [one for loader in [OwnLoader(make())] for _ in range(2) for one in loader]


STEP_SIZES = {"in order": 4, "a batch sampler": 4, "lists": None, "no batch size": None, "an iterable": None}


@pytest.mark.parametrize("name", STEP_SIZES)
def test_the_samples_of_a_step_are_known_without_a_trace(name: str) -> None:
    loader = LOADERS[name]()
    before = generators.numbers()
    assert step_size(loader) == STEP_SIZES[name]
    assert generators.numbers() == before


def test_a_first_batch_is_read_by_a_worker_and_leaves_all_untouched() -> None:
    loader = LOADERS["worker_init_fn"]()
    assert first_batch(loader, 6)[:, 0].tolist() == [0, 1, 2, 3, 4, 5]
    assert loader.dataset.handle is None
    held = LOADERS["held generators"]()
    state = held.dataset.rng.bit_generator.state
    assert len(first_batch(held, 6)) == 6
    assert held.dataset.rng.bit_generator.state == state
    assert len(first_batch(LOADERS["a stream"](), 6)) == 6
    with pytest.raises(DataError, match="read in training alone"):
        first_batch(given.Batches(), 6)


# -- several ranks ----------------------------------------------------------------------------------------------------


SHARED = ("shuffled", "lists", "a sampler", "a sampler of epochs that differ")


def _share(number: int, folder: Path) -> None:
    join(number, folder)
    found = {}
    for name in SHARED:
        generators.seed_all(SEED + 7 * number)  # ranks draw differently
        loader = OwnLoader(shared_out(LOADERS[name](), number, 2), world_size=2)
        found[name] = [
            (one.batch[:, 0].tolist(), one.total, one.is_padding, one.is_last) for _ in range(2) for one in loader
        ]
    for rows in (8, 2):  # rank 0 has fewer
        loader = OwnLoader(DataLoader(given.Stream(rows if number == 0 else 8), 2), world_size=2)
        found[str(rows)] = [
            (len(one.batch), one.total, one.is_padding, one.is_last) for _ in range(2) for one in loader
        ]
    leave(number, folder, found)


@pytest.mark.slow
def test_ranks_share_each_batch_out(tmp_path: Path) -> None:
    first, second = of_ranks(_share, tmp_path)
    for name in SHARED:
        generators.seed_all(SEED)
        alone = OwnLoader(LOADERS[name]())
        expected = [one.batch[:, 0].tolist() for _ in range(2) for one in alone]
        steps = list(zip(first[name], second[name], strict=True))
        joined = [[row for rows, _, is_padding, _ in pair if not is_padding for row in rows] for pair in steps]
        assert joined == expected
        assert all(one[1] == other[1] == len(whole) for (one, other), whole in zip(steps, expected, strict=True))
    assert [len(first[rows]) for rows in ("8", "2")] == [len(second[rows]) for rows in ("8", "2")] == [8, 2]
    assert all(one[1] == 4 and one[3] == other[3] for one, other in zip(first["8"], second["8"], strict=True))


@pytest.mark.parametrize(
    ("name", "why"),
    [("no batch size", "its data set"), ("an __iter__ of its own", "OwnIter")],
)
def test_what_can_not_be_shared_out_is_refused(name: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"batches are made by {why}, and each step is shared out to 2 ranks"):
        shared_out(LOADERS[name](), 0, 2)


def test_a_sampler_that_shares_out_itself_is_refused() -> None:
    rows = given.Rows()
    sampler = torch.utils.data.DistributedSampler(rows, num_replicas=2, rank=0)
    with pytest.raises(ConfigError, match="DistributedSampler gives one of 2 ranks its share"):
        shared_out(DataLoader(rows, 4, sampler=sampler), 0, 2)
