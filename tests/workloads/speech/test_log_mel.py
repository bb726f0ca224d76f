import pytest
import torch

from tests.workloads.speech.recordings import tone
from workloads.speech.log_mel import FLOOR, LogMel, mel_bank


def test_a_tone_is_in_its_band():
    log_mel = LogMel(16_000, 16_000, 40)
    found = log_mel(torch.from_numpy(tone(1000))[None])
    assert found.shape == (1, 40, log_mel.num_frames)
    assert log_mel.num_frames == 98
    top = mel_bank(16_000, 400, 40).argmax(0) * 40.0
    assert abs(float(top[found[0, :, 50].argmax()]) - 1000) < 60


def test_each_clip_is_what_it_is_alone_and_silence_is_the_floor():
    log_mel = LogMel(16_000, 16_000, 40)
    audio = torch.randint(-9000, 9000, (5, 16_000), dtype=torch.int16)
    torch.testing.assert_close(torch.cat([log_mel(each[None]) for each in audio]), log_mel(audio), atol=1e-6, rtol=0)
    assert torch.allclose(log_mel(torch.zeros(1, 16_000, dtype=torch.int16)).exp(), torch.tensor(FLOOR))


@pytest.mark.parametrize(("rate", "num_mels"), [(16_000, 40), (8000, 128), (44_100, 80)])
def test_no_band_is_empty(rate: int, num_mels: int):
    bank = mel_bank(rate, round(0.025 * rate), num_mels)
    assert bool((bank.sum(0) > 0).all())
    assert float(bank.max()) <= 1
