"""The loader's rates in loose bounds; `benchmarks/loader.py` gives the exact ones."""

import statistics

import pytest
import torch

from benchmarks import loader


@pytest.fixture(scope="module")
def data():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield loader.Triplets()
    torch.set_num_threads(threads)


@pytest.mark.slow
def test_whole_batches_are_near_the_memorys_limit_and_far_above_the_naive_loader(data):
    raw, _ = loader.measure(data, 2048, rounds=5, seconds=0.06)
    assert statistics.median(loader.ratios(raw, "ours, inline", "limit")) >= 0.25
    assert statistics.median(loader.ratios(raw, "ours, inline", "naive")) >= 50


@pytest.mark.slow  # of a quiet machine: other processes take the cores from worker and step
def test_a_device_with_steps_of_a_millisecond_is_busy(data):
    raw = loader.measure_busy(data, 2048, rounds=5, num=150)
    assert max(raw["ours, threads"]) >= 0.90
    assert max(raw["naive"]) < 0.5  # what is measured can be low


@pytest.mark.slow
def test_every_variant_is_measured_once_a_round(data):
    for raw in loader.measure(data, 8192, rounds=2, seconds=0.001):
        assert list(raw) == ["limit", "naive", "ours, inline", "ours, threads"]
        assert all(len(rates) == 2 and min(rates) > 0 for rates in raw.values())
    low, high = loader.interval([1.0, 2.0, 3.0])
    assert low < 2.0 < high


@pytest.mark.slow
def test_our_batches_hold_the_rows_of_the_data(data):
    batch = next(loader.ours(data, 64, loader.OURS["inline"])).batch
    users, items, negatives = batch
    pairs = set(zip(data.users.tolist(), data.items.tolist(), strict=True))
    assert set(zip(users.tolist(), items.tolist(), strict=True)) <= pairs
    assert users.shape == items.shape == negatives.shape == (64,)
    assert len(set(users.tolist())) > 8
