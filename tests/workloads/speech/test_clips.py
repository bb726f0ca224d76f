import pickle

import pytest
import torch

from wellfed.contract import FEATURE_MODES
from wellfed.memory.features import hold, of_data
from wellfed.sample_rng import SampleRng
from workloads.speech.clips import Masking


def prepared(data, part, mode, indices, epoch=0):
    features = of_data(data.features)
    source = hold(features, mode, torch.device("cpu"))
    return part.on_device(part.for_features(mode).fetch(indices), SampleRng(0, epoch), source)


@pytest.mark.parametrize("split", ["train", "val"])
def test_all_modes_give_the_same(data, split):
    part = getattr(data, split)
    indices = torch.arange(len(part)).flip(0)
    dynamic, *others = (prepared(data, part, mode, indices) for mode in reversed(FEATURE_MODES))
    assert set(dynamic) == {"clip", "label", "split", "log_mel"}
    for other in others:
        torch.testing.assert_close(other, dynamic, atol=2e-6, rtol=0)


def test_batches_carry_what_a_mode_lacks_and_no_more(data):
    indices = torch.tensor([3, 1])
    names = {mode: set(data.train.for_features(mode).fetch(indices)) for mode in FEATURE_MODES}
    common = {"clip", "label", "split"}
    assert names == {"cache": common, "cache_host": common | {"log_mel"}, "dynamic": common | {"audio"}}
    assert data.train.fetch(indices)["audio"].shape == (2, 16_000)


def test_a_batch_that_lacks_all_needs_features(data):
    batch = data.train.for_features("cache").fetch(torch.tensor([0]))
    with pytest.raises(ValueError, match="wants the features"):
        data.train.on_device(batch, SampleRng(0, 0))


def test_the_table_of_the_rows_is_the_store(data):
    indices = torch.tensor([5, 0, 7])
    features = data.features
    store = features.store()
    assert store.nbytes == features.bytes
    torch.testing.assert_close(features.cut(store, indices), features.rows(indices), atol=2e-6, rtol=0)


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
    whole = masking(log_mel, clips, SampleRng(0, 3, batch=1))
    parts = [masking(log_mel[part], clips[part], SampleRng(0, 3, batch=9)) for part in (slice(0, 2), slice(2, 6))]
    assert torch.equal(torch.cat(parts), whole)
    assert not torch.equal(masking(log_mel, clips, SampleRng(0, 4)), whole)
    assert not torch.equal(masking(log_mel, clips, SampleRng(1, 3)), whole)


def test_what_a_mask_does():
    log_mel = torch.randn(200, 40, 98)
    found = Masking(0.0, 0.2, 0.2)(log_mel, torch.arange(200), SampleRng(0, 0))
    is_mean = found == log_mel.mean(2, keepdim=True)
    assert torch.equal(found[~is_mean], log_mel[~is_mean])
    bands, frames = is_mean.all(2).sum(1), is_mean.all(1).sum(1)
    assert (int(bands.min()), int(bands.max())) == (0, 8)
    assert int(frames.max()) == 19
    moved = Masking(0.1, 0.0, 0.0)(log_mel, torch.arange(200), SampleRng(0, 0))
    assert any(torch.equal(moved[clip, :, 10:], log_mel[clip, :, :-10]) for clip in range(200))
    assert torch.equal(Masking(0, 0, 0)(log_mel, torch.arange(200), SampleRng(0, 0)), log_mel)
