import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset

from tests.kit import sets
from tests.kit.few import few
from wellfed.data.eval_loader import EvalLoader
from wellfed.data.settings import LoaderSettings
from wellfed.errors import DataError

INLINE = LoaderSettings()
GRID = [(workers, prefetch) for workers in (1, 2, 3) for prefetch in (1, 2, 4)]
THREADS = [LoaderSettings("threads", workers, prefetch, timeout_s=30 * (prefetch % 2)) for workers, prefetch in GRID]
PROCESSES = [
    LoaderSettings("processes", workers, prefetch, persistent_workers=True, timeout_s=30 * (prefetch % 2))
    for workers, prefetch in GRID
]
TORCH = [LoaderSettings("torch"), *(LoaderSettings("torch", *some, persistent_workers=True) for some in GRID)]
ENDING = [LoaderSettings("processes", 2, 2), LoaderSettings("torch", 1, 2)]
"""Worker processes that end with the epoch."""


def named(plan):
    kept = "-kept" if plan.persistent_workers else ""
    return f"{plan.backend}-{plan.num_workers}-{plan.prefetch_factor}{kept}"


def loader(dataset, plan=INLINE, **more):
    return sets.loader_of(dataset, plan, **more)


def flat(delivery):
    """A delivery as something that compares."""
    batch = delivery.batch
    tensors = batch if isinstance(batch, dict) else {"": batch}
    values = {name: tensor.double().tolist() for name, tensor in tensors.items()}
    return delivery.epoch, delivery.index, delivery.total, delivery.is_padding, values


def deliveries(made, num_epochs=2):
    try:
        return [flat(delivery) for _ in range(num_epochs) for delivery in made]
    finally:
        made.close()


@pytest.fixture(scope="module")
def expected():
    return {kind: deliveries(loader(kind())) for kind in (sets.Fetching, sets.Global)}


def test_two_epochs_are_every_sample_twice_in_two_orders(expected):
    for kind, column in ((sets.Fetching, "index"), (sets.Global, "")):
        ids = [entry[4][column] for entry in expected[kind]]
        ids = [int(i[0] if isinstance(i, list) else i) for part in ids for i in part]
        assert sorted(ids[: sets.SIZE]) == sorted(ids[sets.SIZE :]) == list(range(sets.SIZE))
        assert ids[: sets.SIZE] != ids[sets.SIZE :]
    noise = [x for entry in expected[sets.Fetching] for x in entry[4]["noise"]]
    assert len(set(noise)) == 2 * sets.SIZE  # another draw in each epoch


SOME = [INLINE, THREADS[0], *THREADS[4:], *PROCESSES[1::3], PROCESSES[8], TORCH[0], *TORCH[2::3], *ENDING]
MORE = [plan for plan in [*THREADS, *PROCESSES, *TORCH] if plan not in SOME]
"""Other numbers of the same."""


@pytest.mark.parametrize("plan", [*few(SOME, 7), *few(MORE, 0)], ids=named)
def test_whole_batches_are_the_same_whoever_builds_them_and_from_any_position(expected, plan):
    made = loader(sets.Fetching(), plan)
    assert [flat(delivery) for _ in range(2) for delivery in made] == expected[sets.Fetching]
    positions = range(12) if plan.persistent_workers or plan.backend in ("inline", "threads") else (4, 9)
    for position in positions:
        made.load_state_dict({"epoch": position // 6, "batch": position % 6})
        assert [flat(delivery) for delivery in made] == expected[sets.Fetching][position : 6 * (position // 6 + 1)]
    made.close()


@pytest.mark.parametrize("plan", [PROCESSES[4], PROCESSES[8], TORCH[0], TORCH[5], *ENDING], ids=named)
def test_samples_that_draw_from_global_generators_are_the_same(expected, plan):
    assert deliveries(loader(sets.Global(), plan)) == expected[sets.Global]


@pytest.mark.parametrize("plan", [INLINE, THREADS[3], PROCESSES[0]], ids=named)
def test_data_that_writes_to_its_indices_changes_no_order(expected, plan):
    made = loader(sets.Writing(), plan)
    for _ in range(2):  # the order of the epoch is kept from the first time
        made.load_state_dict({"epoch": 0, "batch": 0})
        assert [flat(delivery) for delivery in made] == expected[sets.Fetching][:6]
    made.close()


def test_the_trainings_own_generators_are_left_alone():
    torch.manual_seed(5)
    before = torch.rand(3)
    torch.manual_seed(5)
    deliveries(loader(sets.Global()))
    assert torch.rand(3).equal(before)


@pytest.mark.parametrize("plan", [INLINE, THREADS[3], TORCH[0]], ids=named)
def test_resumed_at_any_batch_it_goes_on_as_if_never_stopped(expected, plan):
    kind = sets.Global if plan.backend == "torch" else sets.Fetching
    for stop in range(len(expected[kind]) + 1):
        first = loader(kind(), plan)
        seen = []
        while len(seen) < stop:
            for delivery in first:
                seen.append(flat(delivery))
                if len(seen) == stop:
                    break
        state = pickle.loads(pickle.dumps(first.state_dict()))
        first.close()
        second = loader(kind(), plan)
        second.load_state_dict(state)
        assert second.epoch == (stop // 6 if stop else 0)
        while len(seen) < len(expected[kind]):
            seen += [flat(delivery) for delivery in second]
        second.close()
        assert seen == expected[kind]


def test_closing_ends_the_worker_processes_and_iterating_starts_them_anew(expected):
    import multiprocessing

    before = set(multiprocessing.active_children())
    made = loader(sets.Fetching(), PROCESSES[4])
    assert len([flat(delivery) for delivery in made]) == 6
    assert set(multiprocessing.active_children()) > before
    made.close()
    assert set(multiprocessing.active_children()) == before
    assert deliveries(made, 1) == expected[sets.Fetching][6:]


@settings(max_examples=30)
@given(
    stops=st.lists(st.integers(1, 7), max_size=4), batch_size=st.integers(1, 30), drop_last=st.booleans(),
    limit=st.none() | st.integers(1, 4), skip=st.sets(st.integers(0, sets.SIZE - 2), max_size=6),
)  # fmt: skip
def test_any_chain_of_resumes_gives_the_same_deliveries(stops, batch_size, drop_last, limit, skip):
    options = {
        "batch_size": batch_size, "drop_last": drop_last, "limit_batches": limit, "skip_ids": tuple(sorted(skip)),
    }  # fmt: skip
    try:
        whole = deliveries(loader(sets.Fetching(), **options), 3)
    except DataError:
        assert drop_last
        assert sets.SIZE - len(skip) < batch_size
        return
    seen, state = [], {"epoch": 0, "batch": 0}
    for stop in [*stops, 10**6]:
        made = loader(sets.Fetching(), **options)
        made.load_state_dict(state)
        left = min(stop, len(whole) - len(seen))
        while left:
            for delivery in made:
                seen.append(flat(delivery))
                left -= 1
                if not left:
                    break
        state = made.state_dict()
    assert seen == whole
    ids = {i for entry in seen for i in entry[4]["index"]}
    assert not ids & skip
    if drop_last:
        assert {len(entry[4]["index"]) for entry in seen} == {batch_size}


def test_with_other_skip_ids_the_epoch_begins_anew(caplog):
    first = loader(sets.Fetching(), batch_size=4)
    for delivery in first:
        if delivery.index == 2:
            break
    second = loader(sets.Fetching(), batch_size=4, skip_ids=(3, 7))
    second.load_state_dict(first.state_dict())
    ids = [index for delivery in second for index in delivery.batch["index"].tolist()]
    assert sorted(ids) == sorted(set(range(sets.SIZE)) - {3, 7})
    assert "loader.skip_ids" in caplog.text


class Filled:
    """Sample 0 holds NaN."""

    def __len__(self):
        return sets.SIZE

    def __getitem__(self, index):
        return torch.tensor(float("nan") if index == 0 else float(index))


def test_a_search_for_nan_names_sample_epoch_and_batch():
    first = loader(Filled(), shuffle=False)
    deliveries = iter(first)
    for _ in range(3):
        next(deliveries)
    found = first.non_finite_sample(first.state_dict(), steps=3)
    assert (found.sample, found.epoch, found.batch) == (0, 0, 0)
    assert first.non_finite_sample(first.state_dict(), steps=2) is None


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_share_each_step(expected, world_size):
    ranks = [deliveries(loader(sets.Fetching(), rank=rank, world_size=world_size)) for rank in range(world_size)]
    for alone, *shares in zip(expected[sets.Fetching], *ranks, strict=True):
        for name in ("index", "noise", "other"):
            together = [value for share in shares if not share[3] for value in share[4][name]]
            assert together == alone[4][name]
        assert {share[2] for share in shares} == {alone[2]}


def test_a_users_collate_is_used(expected):
    made = loader(sets.Global(), collate=sets.collate_sum)
    assert [delivery.batch.shape for delivery in made][:2] == [(4,), (4,)]


class FetchOnly:
    fetch, __len__ = sets.Fetching.fetch, sets.Fetching.__len__


class WithoutItems(Dataset):
    __len__ = sets.Fetching.__len__


class Endless(Dataset):
    def __getitem__(self, index):
        return index


class WithoutRng(sets.Fetching):
    def fetch(self, indices):
        return super().fetch(indices, None)


def test_a_fetch_that_lacks_an_argument_is_told_with_the_first_batch():
    with pytest.raises(DataError, match=r"^WithoutRng: fetch could not load .*2 positional arguments but 3 were given"):
        next(iter(loader(WithoutRng())))


def test_what_makes_no_step_is_refused_with_the_way_out():
    with pytest.raises(DataError, match=r"WithoutItems gives no samples: it has no __getitem__ of its own\. Give it"):
        loader(WithoutItems())
    with pytest.raises(
        DataError,
        match=r"FetchOnly gives no samples: .*Give it __getitem__\(index\) or __getitems__\(indices\), beside fetch",
    ):
        loader(FetchOnly())
    with pytest.raises(DataError, match=r"Endless has no __len__, the number of its samples\. Give it one"):
        loader(Endless())
    with pytest.raises(DataError, match=r"^list has no training samples: its __len__ is 0\. Check workload\.data"):
        loader([])
    with pytest.raises(DataError, match=r"skip_ids leaves out all 23 training samples\. Set loader\.skip_ids=\[\]"):
        loader(sets.Fetching(), skip_ids=tuple(range(30)))
    with pytest.raises(DataError, match=r"^3 training samples make no step"):
        loader(sets.Fetching(), skip_ids=tuple(range(20)), drop_last=True)
    with pytest.raises(DataError, match=r"23 .*effective_batch_size=24 with workload\.drop_last=true\. Set a smaller"):
        loader(sets.Fetching(), batch_size=24, drop_last=True)


class Forgetting(sets.Fetching):
    """Returns nothing for the second batch."""

    def fetch(self, indices, rng):
        return None if 4 in indices else super().fetch(indices, rng)


@pytest.mark.parametrize(
    "plan", [INLINE, LoaderSettings("threads", 1, 2), LoaderSettings("processes", 1, 2)], ids=named
)
def test_a_fetch_that_returns_nothing_is_told(plan):
    made = loader(Forgetting(), plan, shuffle=False)
    with pytest.raises(DataError, match=r"^Forgetting: fetch returned None for training batch 1 of epoch 0\. It must"):
        list(made)
    made.close()


def test_a_collate_or_an_evaluation_that_returns_nothing_is_told():
    with pytest.raises(DataError, match="^Global: collate returned None for training batch 0"):
        next(iter(loader(sets.Global(), collate=lambda samples: None)))
    with pytest.raises(DataError, match="^Forgetting: fetch returned None for evaluation batch 1"):
        list(EvalLoader(Forgetting(), 4, seed=1))


@pytest.mark.parametrize("plan", [INLINE, THREADS[0], PROCESSES[0], TORCH[0]], ids=named)
def test_each_batch_says_what_building_it_took(plan):
    kinds = (sets.Waiting, sets.Computing)
    if plan.backend == "torch":  # which leaves `fetch` alone
        kinds = (sets.WaitingItems, sets.ComputingItems)
    for kind, is_busy in zip(kinds, (False, True), strict=True):
        made = loader(kind(), plan)
        times = [delivery.took for delivery in made]
        made.close()
        assert len(times) == 6
        for took in times:
            assert took.wall_ms > 0.99 * took.cpu_ms
            assert took.wall_ms > 9.9
            assert (took.cpu_ms > 9.9) is is_busy
