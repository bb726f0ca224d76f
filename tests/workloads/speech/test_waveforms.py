import io

import numpy as np
import pytest
import soundfile
import torch

from tests.workloads.speech.recordings import shard, tone, wav
from workloads.speech.clip_files import find_clips
from workloads.speech.layouts import examined_layouts
from workloads.speech.waveforms import Waveforms


def encoded(sound, rate=16_000, **how):
    out = io.BytesIO()
    soundfile.write(out, sound, rate, **how)
    return out.getvalue()


@pytest.fixture
def place(tmp_path):
    left, right = tone(440), tone(900)
    clips = {
        "whole.wav": wav(left),
        "long.wav": wav(tone(440, 2.0)),
        "short.wav": wav(left[:12_001]),
        "stereo.wav": wav(np.stack([left, right], 1), channels=2),
        "slow.wav": wav(tone(440, 1.0, 8000), 8000),
        "floats.wav": encoded(left / 32768, format="WAV", subtype="FLOAT"),
        "packed.flac": encoded(left, format="FLAC"),
        "cut.wav": wav(left)[:-100],
        "noise.wav": b"x" * 500,
        "fast.wav": wav(left, 4_000_000),
        "cut.flac": encoded(left, format="FLAC")[:9000],
    }
    members = [(f"{name.replace('.', '_')}.{name[-4:].lstrip('.')}", content) for name, content in clips.items()]
    for name, content in clips.items():
        (tmp_path / "folder" / "tone").mkdir(parents=True, exist_ok=True)
        (tmp_path / "folder" / "tone" / f"{name.replace('.', '_')}{name[name.index('.') :]}").write_bytes(content)
    with_labels = [each for name, content in members for each in ((name, content), (f"{name.split('.')[0]}.cls", b"0"))]
    shard(tmp_path / "shards" / "0.tar", with_labels)
    return tmp_path


@pytest.fixture(params=["folder", "shards"])
def waveforms(request, place):
    found = find_clips(place / request.param, place / "cache")
    layouts = examined_layouts(found, place / "cache")
    return Waveforms(found.reader, layouts, 16_000, 16_000), {
        name.split("/")[-1]: row for row, name in enumerate(found.names)
    }


def test_all_become_one_rate_and_length(waveforms):
    clips, row = waveforms
    left = torch.from_numpy(tone(440))
    names = ["whole_wav", "long_wav", "short_wav", "stereo_wav", "slow_wav", "floats_wav", "packed_flac"]
    audio = dict(zip(names, clips.read(np.array([row[name] for name in names])), strict=True))
    assert audio["whole_wav"].dtype == torch.int16
    assert torch.equal(audio["whole_wav"], left)
    assert torch.equal(audio["long_wav"], torch.from_numpy(tone(440, 2.0)[8000:24_000]))
    before = (16_000 - 12_001) // 2
    assert torch.equal(audio["short_wav"][before : before + 12_001], left[:12_001])
    assert not audio["short_wav"][:before].any()
    assert not audio["short_wav"][before + 12_001 :].any()
    mixed = (tone(440).astype(float) + tone(900)) / 2
    assert np.abs(audio["stereo_wav"].numpy() - mixed).max() <= 1
    assert (audio["slow_wav"] - left)[1000:-1000].abs().max() < 100
    assert (audio["floats_wav"] - left).abs().max() <= 1
    assert torch.equal(audio["packed_flac"], left)
    assert torch.equal(clips.read(np.array([row["whole_wav"]] * 3)), left.expand(3, -1))


def test_damaged_ones_are_known(waveforms):
    clips, row = waveforms
    reasons = clips.layouts.damages
    assert set(reasons) == {row["cut_wav"], row["noise_wav"], row["fast_wav"], row["cut_flac"]}
    assert "cut off" in reasons[row["cut_wav"]]
    assert "no wav file" in reasons[row["noise_wav"]]
    assert "4,000,000 samples a second" in reasons[row["fast_wav"]]
    assert reasons[row["cut_flac"]].startswith(("cut off", "it can't be decoded"))
