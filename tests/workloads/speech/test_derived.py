"""What follows from recordings that nobody prepared."""

import numpy as np
import pytest
import torch

from tests.workloads.speech.recordings import tone, voices, wav
from wellfed import ConfigError, DataError
from wellfed.config.compose import compose
from wellfed.run.planner import plan_without_running
from workloads.speech.data import datasets
from workloads.speech.derived import chosen_mels, chosen_passes, chosen_rate, chosen_seconds
from workloads.speech.log_mel import mel_bank


def test_the_rate_is_the_one_that_the_clips_have():
    assert chosen_rate(np.full(288, 8000)) == (8000, "all 288 clips have it")
    mixed = np.array([44_100] * 5 + [128_000, 8000])
    assert chosen_rate(mixed) == (44_100, "5 of 7 clips have it; the others are resampled")
    assert chosen_rate(np.array([16_000, 8000]))[0] == 8000, "of as many the lower one"
    assert chosen_rate(np.full(3, 96_000))[0] == 48_000


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ([1.0] * 50, 1.0),
        ([0.75] * 3, 0.75),
        ([0.5] * 97 + [1.13] * 2 + [30.0], 1.2),
        ([1.2, 0.4], 1.2),
        ([0.01] * 4, 0.1),
        ([12.0] * 4, 5.0),
    ],
)
def test_the_length_holds_nearly_all_clips(seconds, chosen):
    assert chosen_seconds(np.array(seconds))[0] == chosen


@pytest.mark.parametrize("rate", [1000, 2000, 4000, 8000, 16_000, 44_100, 48_000])
def test_no_band_is_empty_at_any_rate(rate):
    bands, because = chosen_mels(rate)
    assert bands == 40 or rate < 8000
    window = round(0.025 * rate)
    bank = mel_bank(rate, window, bands)
    assert (bank.sum(0) > 0).all()
    assert len(bank.T.unique(dim=0)) == bands, "no two bands are the same"
    assert f"{rate // 2:,} Hz" in because


@pytest.mark.parametrize(("clips", "passes"), [(1, 1500), (120, 12), (288, 5), (1000, 1), (1600, 1), (90_000, 1)])
def test_a_small_set_is_passed_over_several_times_in_an_epoch(clips, passes):
    assert chosen_passes(clips)[0] == passes


@pytest.mark.slow
def test_the_plan_says_what_follows_from_the_clips(tmp_path):
    place = voices(tmp_path / "wavs")
    words = ["workload=speech", f"workload.data.path={place}"]
    words.append(f"paths.cache_dir={tmp_path / 'cache'}")
    plan = plan_without_running(compose([*words, "workload.data.num_mels=32"])).to_dict()["plan"]
    found = {knob: (one["value"], one["because"]) for knob, one in plan.items() if one["source"] == "data"}
    assert found == {
        "workload.data.sample_rate": (8000, "all 24 clips have it"),
        "workload.data.clip_seconds": (1.2, "98 % of the clips are no longer; the longest has 1.20 s"),
        "workload.data.passes": (83, "with 18 training clips an epoch has 1,494, each changed in another way"),
    }


def test_what_is_typed_stays(tmp_path):
    place = voices(tmp_path / "wavs")
    typed = {"clip_seconds": 0.5, "sample_rate": 16_000, "num_mels": 24, "passes": 2}
    data = datasets(str(place), **typed, cache_dir=str(tmp_path))
    assert not data.derived
    assert data.train.fetch(torch.tensor([0]))["audio"].shape == (1, 8000)
    assert (data.model_args["num_mels"], len(data.train)) == (24, 36)


def test_the_same_clips_give_the_same_values_again(tmp_path):
    place = voices(tmp_path / "wavs")
    first, again = (datasets(str(place), cache_dir=str(tmp_path / name), seed=1) for name in "ab")
    assert first.derived == again.derived


def test_clips_of_no_length_and_of_mixed_rates(tmp_path):
    place = voices(tmp_path / "wavs")
    (place / "yes" / "empty.wav").write_bytes(wav(tone(seconds=0.0)))
    (place / "yes" / "fast.wav").write_bytes(wav(tone(rate=44_100), 44_100))
    data = datasets(str(place), cache_dir=str(tmp_path))
    assert data.derived["workload.data.sample_rate"] == (8000, "24 of 25 clips have it; the others are resampled")
    assert any("1 damaged recording left out" in note and "it holds no samples" in note for note in data.notes)
    assert "1 clip resampled from 44,100 to 8,000 Hz" in data.notes


def test_fewer_clips_than_classes_times_splits(tmp_path):
    place = voices(tmp_path / "wavs", clips=1)
    with pytest.raises(
        DataError, match=r"2 clips can't be split into train, val, test: workload\.data\.path needs more"
    ):
        datasets(str(place), cache_dir=str(tmp_path))
    without = datasets(str(place), val_frac=0, test_frac=0, cache_dir=str(tmp_path))
    assert (len(without.train), without.derived["workload.data.passes"][0]) == (1500, 750)


@pytest.mark.parametrize(
    ("name", "value"), [("sample_rate", 3), ("clip_seconds", 0.01), ("num_mels", 2), ("passes", 0)]
)
def test_a_wrong_value_is_told_with_the_way_out(name, value, tmp_path):
    with pytest.raises(ConfigError, match=rf"workload\.data\.{name}: {value} .* or null") as caught:
        datasets(cache_dir=str(tmp_path), **{name: value})
    assert len(caught.value.faults) == 1
