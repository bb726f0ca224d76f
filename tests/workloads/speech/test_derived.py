"""What follows from recordings that nobody prepared."""

import numpy as np
import pytest

from tests.workloads.speech.recordings import voices
from wellfed.config.compose import compose
from wellfed.run.planner import plan_without_running
from workloads.speech.derived import chosen_mels, chosen_rate, chosen_seconds
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
