"""Datasets as people write them: generators of their own, whole batches, attributes that a hook changes."""

import functools
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, get_worker_info

from tests.kit import sets
from tests.kit.few import few, slow
from wellfed.data.backends.batch_builder import BatchBuilder
from wellfed.data.backends.batch_request import BatchRequest
from wellfed.data.eval_loader import EvalLoader
from wellfed.data.settings import LoaderSettings
from wellfed.errors import DataError

INLINE = LoaderSettings()
ONE, THREE = LoaderSettings("processes", 1, 2), LoaderSettings("processes", 3, 2, persistent_workers=True)
WORKERS = [ONE, THREE, LoaderSettings("torch", 2, 2)]


def loader(dataset, plan=INLINE, **more):
    return sets.loader_of(dataset, plan, **more)


def read(dataset, plan=INLINE, num_epochs=2, **more):
    """All batches of some epochs."""
    made = loader(dataset, plan, **more)
    try:
        return [one.batch for _ in range(num_epochs) for one in made]
    finally:
        made.close()


def equal(one, other):
    return len(one) == len(other) and all(map(torch.equal, one, other))


# -- generators ------------------------------------------------------------------------------------------------------


class Drawing(Dataset):
    """Adds the draw of ``noise`` to each index."""

    def __init__(self, noise=None):
        self.noise = noise

    def __len__(self):
        return sets.SIZE

    def __getitem__(self, index):
        return torch.tensor([index, self.noise()], dtype=torch.float64)


class Holding:
    """A transform with a generator."""

    def __init__(self, generator):
        self.generator = generator

    def __call__(self):
        return draw(self.generator)


def draw(generator):
    if isinstance(generator, torch.Generator):
        return torch.rand((), generator=generator).item()
    return generator.random() if hasattr(generator, "random") else generator.rand()


class Composed:
    def __init__(self, *parts):
        self.parts = list(parts)

    def __call__(self):
        return sum(part() for part in self.parts)


class Lazy(Drawing):
    """Makes its generator when it is first needed, as in each worker."""

    generator = None

    def __getitem__(self, index):
        if self.generator is None:
            self.generator = np.random.default_rng(torch.initial_seed())
        return torch.tensor([index, self.generator.random()], dtype=torch.float64)


class OfClass(Drawing):
    generator = np.random.default_rng(1)

    def __getitem__(self, index):
        return torch.tensor([index, self.generator.random()], dtype=torch.float64)


class WithRng(Drawing):
    """Takes the engine's generator, and uses its own."""

    def __getitem__(self, index, rng):
        return super().__getitem__(index)


def closed_over(generator):
    return lambda: 2 * generator.random()


def of_module():
    return MODULES.random()


def of_another_module():
    return sets.noise()


class Slots:
    __slots__ = ("generator",)

    def __init__(self):
        self.generator = NUMPY()

    def __call__(self):
        return self.generator.random()


MODULES = np.random.default_rng(2)
NUMPY = functools.partial(np.random.default_rng, 3)
HOLDERS = {
    "numpy": lambda: Drawing(Holding(NUMPY())),
    "numpy, older bits": lambda: Drawing(Holding(np.random.Generator(np.random.MT19937(3)))),
    "python": lambda: Drawing(Holding(random.Random(3))),
    "RandomState": lambda: Drawing(Holding(np.random.RandomState(3))),
    "torch": lambda: Drawing(Holding(torch.Generator())),
    "a composed transform's": lambda: Drawing(Composed(Holding(NUMPY()), Holding(random.Random(3)))),
    "a method's": lambda: Drawing(NUMPY().random),
    "a partial's": lambda: Drawing(functools.partial(draw, NUMPY())),
    "a closure's": lambda: Drawing(closed_over(NUMPY())),
    "the module's": lambda: Drawing(of_module),
    "another module's": lambda: Drawing(of_another_module),
    "in slots": lambda: Drawing(Slots()),
    "the class's": OfClass,
    "made late": Lazy,
    "beside rng": lambda: WithRng(Holding(NUMPY())),
    "of a subset": lambda: Subset(Drawing(Holding(NUMPY())), range(sets.SIZE)),
    "of two sets": lambda: ConcatDataset([Drawing(Holding(NUMPY())), Drawing(Holding(random.Random(4)))]),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_draws_from_a_held_generator_depend_on_the_sample_alone(name):
    def built(builder, epoch, *batches):
        return [builder(BatchRequest(epoch, batch, torch.arange(4 * batch, 4 * batch + 4))).batch for batch in batches]

    in_order = built(BatchBuilder(HOLDERS[name](), 1), 0, *range(5))
    assert equal(built(BatchBuilder(HOLDERS[name](), 1), 0, 3, 1, 3), [in_order[at] for at in (3, 1, 3)])
    drawn = torch.cat(in_order)[:, 1].tolist()
    for seed, epoch in ((1, 1), (2, 0)):
        drawn += torch.cat(built(BatchBuilder(HOLDERS[name](), seed), epoch, *range(5)))[:, 1].tolist()
    assert len(set(drawn)) == len(drawn)


@pytest.mark.parametrize("name", few(HOLDERS, 1))
def test_any_number_of_workers_learns_the_same_from_held_generators(name):
    expected = read(HOLDERS[name]())
    for plan in [THREE] if name == "numpy" else WORKERS:
        assert equal(read(HOLDERS[name](), plan), expected), plan


def test_reading_leaves_a_held_generator_where_it_was():
    generator = NUMPY()
    read(Drawing(Holding(generator)))
    assert generator.random() == NUMPY().random()


class FetchingHeld(sets.Fetching):
    def __init__(self):
        self.generator = NUMPY()

    def fetch(self, indices, rng):
        return torch.from_numpy(self.generator.random(len(indices)))


@pytest.mark.parametrize("plan", [LoaderSettings("threads", 3, 2), slow(THREE)], ids=["threads", "processes"])
def test_a_fetch_finds_held_generators_seeded_for_its_batch(plan):
    found = read(FetchingHeld())
    assert equal(read(FetchingHeld(), plan), found)
    assert len(set(torch.cat(found).tolist())) == 2 * sets.SIZE


class Masking:
    """A collate function with a generator."""

    def __init__(self):
        self.generator = NUMPY()

    def __call__(self, samples):
        return torch.stack(samples) * self.generator.random()


def test_a_collate_function_finds_its_generator_seeded_for_its_batch():
    requests = [BatchRequest(0, batch, torch.arange(4)) for batch in range(3)]
    in_order, builders = BatchBuilder(sets.Global(), 1, collate=Masking()), []
    found = [in_order(request).batch for request in requests]
    builders = [BatchBuilder(sets.Global(), 1, collate=Masking()) for _ in requests]
    assert equal([builder(request).batch for builder, request in zip(builders, requests, strict=True)], found)


# -- __getitems__ ----------------------------------------------------------------------------------------------------


class Whole(Dataset):
    """Read by ``__getitems__`` alone."""

    def __init__(self, *bad):
        self.asked, self.bad = [], bad

    def __len__(self):
        return sets.SIZE

    def __getitems__(self, indices):
        self.asked.append(indices)
        if bad := [index for index in indices if index in self.bad]:
            raise OSError(f"row {bad[0]} is damaged")
        return [(torch.tensor(index), torch.tensor(2.0 * index)) for index in indices]


class BothWays(Whole):
    def __getitem__(self, index):
        raise AssertionError


@pytest.mark.parametrize(
    "make", [Whole, BothWays, lambda: Subset(Whole(), range(22, 0, -1))], ids=["alone", "both", "subset"]
)
def test_whole_batches_are_read_as_torchs_dataloader_reads_them(make):
    torchs = [torch.stack(batch, 1) for batch in DataLoader(make(), 4)]
    ours = [torch.stack(batch, 1) for batch in read(make(), num_epochs=1, shuffle=False)]
    assert equal(ours, torchs)
    dataset = make()
    evaluated = [torch.stack(one.batch, 1) for one in EvalLoader(dataset, 4, seed=1)]
    assert equal(evaluated, torchs)
    assert [len(each) for each in getattr(dataset, "dataset", dataset).asked] == [len(batch) for batch in torchs]


@pytest.mark.parametrize("plan", [INLINE, slow(THREE)], ids=["inline", "processes"])
def test_a_failing_sample_of_whole_batches_is_named_and_may_be_left_out(plan):
    with pytest.raises(DataError, match=r"sample 6 could not be loaded .*row 6 is damaged.*skip_ids=\[6\]"):
        read(Whole(6), plan, shuffle=False)
    kept = [batch[0].tolist() for batch in read(Whole(6), plan, num_epochs=1, shuffle=False, max_skipped=1)]
    assert kept[:3] == [[0, 1, 2, 3], [4, 5, 7], [8, 9, 10, 11]]
    with pytest.raises(DataError, match="evaluation sample 6 could not be loaded"):
        list(EvalLoader(Whole(6), 4, seed=1, settings=replace(plan, persistent_workers=False)))


class Together(Whole):
    """Fails for several indices."""

    def __getitems__(self, indices):
        if len(indices) > 1:
            raise ValueError("shapes differ")
        return super().__getitems__(indices)


def test_a_batch_whose_samples_load_alone_fails_with_its_own_error():
    with pytest.raises(ValueError, match="shapes differ") as caught:
        read(Together(), shuffle=False)
    (note,) = caught.value.__notes__
    assert note.startswith("__getitems__ could not load training batch 0 of epoch 0 (samples 0, 1, 2, 3)")


def columns(samples):
    return samples["x"]


class Columns(Whole):
    """Returns a finished batch, for a collate function that expects one."""

    def __getitems__(self, indices):
        return {"x": torch.tensor(indices)}


def test_a_users_collate_gets_what_it_returns():
    expected = list(DataLoader(Columns(), 4, collate_fn=columns))
    assert equal(read(Columns(), num_epochs=1, shuffle=False, collate=columns), expected)


class DrawingWhole(Whole):
    def __init__(self):
        super().__init__()
        self.generator = NUMPY()

    def __getitems__(self, indices):
        return [torch.tensor([index, random.random(), self.generator.random()]) for index in indices]


@pytest.mark.slow
def test_whole_batches_draw_the_same_with_any_number_of_workers():
    expected = read(DrawingWhole())
    assert all(equal(read(DrawingWhole(), plan), expected) for plan in WORKERS)


# -- changes between epochs ------------------------------------------------------------------------------------------


class Level(Dataset):
    def __init__(self):
        self.level, self.transform = 0, Composed()
        self.num_samples = 8

    def __len__(self):
        return self.num_samples

    def __getitem__(self, index):
        return torch.tensor(10 * self.level + len(self.transform.parts))


class Epochs(Level):
    def set_epoch(self, epoch):
        self.level = epoch


def workers_of(made):
    """Returns the worker processes of the latest pass."""
    return getattr(getattr(made._source._processes, "_iterator", None), "_workers", [])


@pytest.mark.parametrize("plan", [INLINE, LoaderSettings("processes", 2, 2, persistent_workers=True), slow(ONE)])
def test_a_change_between_epochs_reaches_the_next_epochs_samples(plan):
    dataset, seen = Level(), []
    made = loader(dataset, plan)
    for epoch in range(3):
        dataset.level = epoch
        dataset.transform.parts += ["harder"] * (epoch == 2)
        workers = workers_of(made)
        seen.append([one.batch.tolist() for one in made])
    kept = workers_of(made)
    list(made)  # nothing has changed
    if plan.persistent_workers:
        assert kept != workers
        assert workers_of(made) == kept
    made.close()
    assert seen == [[[value] * 4] * 2 for value in (0, 10, 21)]
    assert made.dataset is dataset


@pytest.mark.parametrize("plan", [INLINE, slow(THREE)], ids=["inline", "processes"])
def test_a_dataset_is_told_the_epoch(plan):
    made = loader(Epochs(), plan)
    assert [one.batch[0].item() for _ in range(3) for one in made] == [0, 0, 10, 10, 20, 20]
    made.load_state_dict({"epoch": 7, "batch": 1})
    assert [one.batch[0].item() for one in made] == [70]
    made.close()


def test_another_number_of_samples_is_refused():
    dataset = Level()
    for make in (loader, lambda dataset: EvalLoader(dataset, 4, seed=1)):
        dataset.num_samples = 8
        made = make(dataset)
        list(made)
        dataset.num_samples = 12
        with pytest.raises(DataError, match="Level has 12 samples, and had 8 when the run began"):
            list(made)


# -- faults of workers alone -----------------------------------------------------------------------------------------


class InWorkersAlone(sets.Fetching):
    """Raises in worker processes, as a handle that they share."""

    def __init__(self, ways):
        if "fetch" not in ways:
            self.fetch = None

    def fetch(self, indices, rng):
        return super().fetch(indices, rng)["index"] if get_worker_info() is None else self.breaks()

    def __getitem__(self, index):
        return index if get_worker_info() is None else self.breaks()

    def breaks(self):
        raise OSError("Can't read data (inflate() failed)")


@pytest.mark.parametrize("way", ["item", slow("fetch")])
def test_a_sample_that_fails_in_a_worker_alone_is_not_blamed(way):
    plan = replace(ONE, persistent_workers=False)
    with pytest.raises(DataError) as caught:
        read(InWorkersAlone(way), plan)
    told = str(caught.value)
    assert "could not" in told
    assert "inflate() failed" in told
    assert "loads in the training process: the fault passed, or workers share something" in told
    assert "loader.backend=inline loader.num_workers=0" in told
    assert "skip_ids" not in told
    if way == "item":
        with pytest.raises(DataError, match="evaluation sample 0 could not be loaded by a worker .*share something"):
            list(EvalLoader(InWorkersAlone(way), 4, seed=1, settings=plan))


class Reading(Dataset):
    """Reads a file that it opened in the training process."""

    def __init__(self, path):
        path.write_bytes(bytes(range(sets.SIZE)))
        self.file = path.open("rb")

    def __len__(self):
        return sets.SIZE

    def __getitem__(self, index):
        self.file.seek(index)
        return torch.tensor(self.file.read(1)[0])


def test_a_file_that_workers_share_is_warned_of(tmp_path, caplog):
    dataset = Reading(tmp_path / "rows")
    assert torch.equal(torch.cat(read(dataset, num_epochs=1, shuffle=False)), torch.arange(sets.SIZE))
    assert caplog.text == ""
    read(dataset, ONE)
    assert caplog.text.count("Reading holds the open file") == 1
    assert "rows, which worker processes share" in caplog.text
    dataset.file.close()
