"""The shard reader's rates in a loose bound; `benchmarks/shard_reading.py` gives the exact ones."""

import statistics

import pytest

from benchmarks import shard_reading

OURS = ["reader", "fetch", "loader, inline", "loader, threads"]


@pytest.fixture(scope="module")
def reading(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    return shard_reading.Reading(shard_reading.make_shards(folder, 400, 4), folder / "cache")


@pytest.mark.slow
def test_every_variant_gives_each_clip_once(reading):
    assert {name: sum(reading.variants[name]()) for name in ["raw", *OURS]} == dict.fromkeys(["raw", *OURS], 400)


@pytest.mark.slow
def test_clips_in_any_order_cost_little_more_than_the_bytes_alone(reading):
    cpu = {name: statistics.median(reading.rate(name)[1] for _ in range(7)) for name in ("raw", "fetch")}
    assert cpu["fetch"] >= 0.25 * cpu["raw"]
