import io
import resource

import numpy as np
import psutil
import pytest
import soundfile
import torch

from tests.workloads.speech.recordings import shard, tone, wav
from wellfed import DataError
from workloads.speech.clip_files import find_clips
from workloads.speech.layouts import examined_layouts
from workloads.speech.sound_files import decode
from workloads.speech.wav_layout import DamagedClip
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


def test_flac_that_does_not_say_how_long_it_is_says_so():
    content = bytearray(encoded(tone(), format="FLAC"))
    content[21] &= 0xF0
    content[22:26] = bytes(4)
    with pytest.raises(DamagedClip, match="does not say how long"):
        decode(bytes(content))


def test_flac_that_claims_more_samples_than_its_bytes_hold_is_damaged():
    content = bytearray(encoded(tone(), format="FLAC"))
    content[21] |= 0x07
    with pytest.raises(DamagedClip, match="its header claims .* samples, which .* bytes can't hold"):
        decode(bytes(content))
    silence = encoded(np.zeros(16_000 * 60, np.int16), format="FLAC")
    assert len(decode(silence)[0]) == 16_000 * 60


def test_flac_that_claims_more_samples_than_memory_holds_is_damaged():
    content = bytearray(encoded(tone(seconds=8.0), format="FLAC"))
    stated = 8192 * len(content) - 1
    assert stated > 2**28, "its samples need 1 GiB, and no more than half of it is there"
    content[21] = content[21] & 0xF0 | stated >> 32
    content[22:26] = (stated % 2**32).to_bytes(4, "big")
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + 2**29, before[1]))
    try:
        with pytest.raises(DamagedClip, match=f"its header claims {stated} samples, unlikely in {len(content)} bytes"):
            decode(bytes(content))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_files_that_change_or_go_are_told(place):
    found = find_clips(place / "folder", place / "cache")
    clips = Waveforms(found.reader, examined_layouts(found, place / "cache"), 16_000, 16_000)
    rows = {name: row for row, name in enumerate(found.names)}
    (place / "folder" / "tone" / "whole_wav.wav").write_bytes(b"RIFF")
    with pytest.raises(DataError, match="shorter than it was"):
        clips.read(np.array([rows["tone/whole_wav"]]))
    (place / "folder" / "tone" / "packed_flac.flac").write_bytes(b"fLaC")
    with pytest.raises(DataError, match=r"packed_flac\.flac: .*Start again"):
        clips.read(np.array([rows["tone/packed_flac"]]))
    (place / "folder" / "tone" / "long_wav.wav").unlink()
    with pytest.raises(DataError, match="still there"):
        clips.read(np.array([rows["tone/long_wav"]]))
