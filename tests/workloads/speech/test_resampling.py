import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.workloads.speech.recordings import tone
from workloads.speech import resampling
from workloads.speech.resampling import resample


@pytest.mark.parametrize(
    ("rate", "wanted"), [(8000, 16000), (44100, 16000), (48000, 16000), (16000, 22050), (96000, 8000)]
)
def test_a_tone_stays_the_tone(rate: int, wanted: int):
    found = resample(torch.from_numpy(tone(440, 0.5, rate) / 32768).float()[None], rate, wanted)[0].numpy()
    expected = tone(440, 0.5, wanted) / 32768
    assert len(found) == len(expected)
    middle = slice(len(found) // 8, -len(found) // 8)
    assert np.abs(found - expected)[middle].max() < 2e-3


@pytest.mark.parametrize(("rate", "wanted"), [(7999, 16_000), (123_457, 16_000), (15_993, 16_000), (767_999, 1000)])
def test_a_strange_rate_is_near_enough_and_its_kernel_small(monkeypatch: pytest.MonkeyPatch, rate: int, wanted: int):
    made = []
    monkeypatch.setattr(resampling, "_kernel", lambda *sizes: made.append(sizes) or (torch.zeros(sizes[1], 5), 2))
    resample(torch.zeros(1, 50), rate, wanted)
    step, num_phases = made[0]
    assert step / num_phases == pytest.approx(rate / wanted, rel=5e-4)
    assert max(step, num_phases) <= resampling.MOST_PHASES


def test_what_the_lower_rate_can_not_carry_is_gone():
    found = resample(torch.from_numpy(tone(7000, 0.5, 16000) / 32768).float()[None], 16000, 8000)
    assert found[0, 500:-500].abs().max() < 0.01


@given(st.integers(1, 500), st.sampled_from([8000, 11025, 16000, 44100]), st.sampled_from([8000, 16000, 22050]))
def test_the_length_goes_with_the_rate(length: int, rate: int, wanted: int):
    assert resample(torch.zeros(2, length), rate, wanted).shape == (2, -(-length * wanted // rate))
