import pickle

import pytest
import torch

from tests.workloads.speech.recordings import tone, wav
from wellfed import SampleRng
from wellfed.contract import FEATURE_MODES
from wellfed.train.memory.features import hold, of_data
from workloads.speech.clips import Masking, sounding_frames
from workloads.speech.data import datasets


def prepared(data, part, mode, indices, epoch=0):
    features = of_data(data.features)
    source = hold(features, mode, torch.device("cpu"))
    return part.on_device(part.for_features(mode).fetch(indices), SampleRng(0, epoch), source)


def test_one_sample_is_a_row_and_a_copy_in_a_process_is_the_same(data):
    copy = pickle.loads(pickle.dumps(data.train.for_features("cache_host")))
    assert len(pickle.dumps(copy)) < 50_000
    row = data.train.for_features("cache_host").fetch(torch.tensor([4]))
    torch.testing.assert_close(copy.fetch(torch.tensor([4])), row)
    torch.testing.assert_close(data.train[4]["audio"], data.train.fetch(torch.tensor([4]))["audio"][0])
    with pytest.raises(IndexError):
        data.train[len(data.train)]


def test_masks_are_functions_of_seed_epoch_and_clip():
    log_mel, clips = torch.randn(6, 40, 98), torch.arange(6) + 100
    masking = Masking()
    whole, _ = masking(log_mel, clips, SampleRng(0, 3, batch=1))
    parts = [masking(log_mel[part], clips[part], SampleRng(0, 3, batch=9))[0] for part in (slice(0, 2), slice(2, 6))]
    assert torch.equal(torch.cat(parts), whole)
    assert not torch.equal(masking(log_mel, clips, SampleRng(0, 4))[0], whole)
    assert not torch.equal(masking(log_mel, clips, SampleRng(1, 3))[0], whole)


def test_masks_of_padded_clips_stay_within_the_sound():
    log_mel, clips = torch.randn(200, 40, 98), torch.arange(200)
    sound = torch.tensor([[30, 70], [0, 98], [97, 98], [48, 50]]).repeat(50, 1)
    whole, moved = Masking(0.2, 0.25, 0.0)(log_mel, clips, SampleRng(0, 3), sound)
    length = moved[:, 1] - moved[:, 0]
    assert (moved[:, 0] >= 0).all()
    assert (moved[:, 1] <= 98).all()
    assert (length >= 1).all()
    assert torch.equal(length[::4], torch.full((50,), 40))
    assert int((moved - sound)[::4].abs().max()) == 8
    mean = log_mel[::4, :, 30:70].mean(2, keepdim=True)
    blank = torch.isclose(whole[::4], mean, atol=1e-6).all(1)
    assert int(blank.sum(1).max()) == 10
    assert not (blank & ~sounding_frames(moved[::4], 98)).any()
    halves = (slice(9), slice(9, 200))
    parts = [Masking(0.2, 0.25, 0.0)(log_mel[half], clips[half], SampleRng(0, 3), sound[half]) for half in halves]
    assert torch.equal(torch.cat([part for part, _ in parts]), whole)


def test_padded_clips_say_where_their_sound_is(tmp_path):
    for number in range(8):
        for name, seconds in (("no", 1.0), ("yes", 0.5)):
            (tmp_path / "wavs" / name).mkdir(parents=True, exist_ok=True)
            content = wav(tone(300 + number, seconds))
            (tmp_path / "wavs" / name / f"{number}.wav").write_bytes(content)
    data = datasets(str(tmp_path / "wavs"), cache_dir=str(tmp_path))
    for mode in FEATURE_MODES:
        made = prepared(data, data.train, mode, torch.arange(len(data.train.clip_S)))
        assert set(made) == {"clip", "label", "split", "log_mel", "is_sound"}
        frames = made["is_sound"].sum(1)
        assert (frames[made["label"] == 0] >= 88).all()
        assert ((frames - 50).abs()[made["label"] == 1] <= 1).all()
