import numpy as np
import pytest
import torch

from tests.workloads.speech.recordings import tone
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


def test_what_the_lower_rate_can_not_carry_is_gone():
    found = resample(torch.from_numpy(tone(7000, 0.5, 16000) / 32768).float()[None], 16000, 8000)
    assert found[0, 500:-500].abs().max() < 0.01
