import numpy as np
import pytest
import torch

from tests.workloads.speech.recordings import folder, tone, wav
from wellfed import ConfigError, DataError, SampleRng
from wellfed.data.shards import write_shards
from workloads.speech.data import datasets
from workloads.speech.model import ClipClassifier


def test_a_folder_and_the_shards_of_it_are_the_same_data(data, tones, tmp_path):
    write_shards(tones, tmp_path / "shards", num=3)
    packed = datasets(str(tmp_path / "shards"), cache_dir=str(tmp_path))
    assert packed.model_args == data.model_args == {"num_mels": 40, "num_classes": 2}
    for split in ("train", "val", "test"):
        clips = []
        for each in (data, packed):
            part = getattr(each, split)
            batch = part.fetch(torch.arange(len(part)))
            clips.append(
                {
                    (int(label), audio.numpy().tobytes())
                    for label, audio in zip(batch["label"], batch["audio"], strict=True)
                }
            )
        assert clips[0] == clips[1]
    assert data.notes == (
        "32 training clips of 2 classes (1000.0 KiB of audio), 4 to validate on, 4 to test on",
        "split by speaker: 10 speakers, none in two splits",
    )


def test_what_is_made_of_other_recordings_is_said(tones, tmp_path):
    place = folder(tmp_path / "wavs")
    (place / "yes" / "slow.wav").write_bytes(wav(tone(rate=8000), 8000))
    (place / "yes" / "two.wav").write_bytes(wav(np.stack([tone(seconds=2.0)] * 2, 1), channels=2))
    (place / "yes" / "short.wav").write_bytes(wav(tone(seconds=0.5)))
    (place / "yes" / "broken.wav").write_bytes(wav(tone())[:-7])
    notes = datasets(str(place), clip_seconds=1.0, cache_dir=str(tmp_path)).notes[2:]
    assert notes[:4] == (
        "1 clip resampled from 8,000 to 16,000 Hz",
        "1 clip of several channels mixed down",
        "1 clip longer than clip_seconds cut to the middle",
        "1 clip shorter than clip_seconds padded with silence",
    )
    assert notes[4].startswith(f"1 damaged recording left out, the first: {place}/yes/broken.wav: cut off: 31,993 of")
    with pytest.raises(DataError, match=r"1 damaged recording, and none is allowed \(workload\.data\.max_damaged\)"):
        datasets(str(place), cache_dir=str(tmp_path), max_damaged=0)


def test_all_wrong_arguments_at_once(tmp_path):
    wrong = {"clip_seconds": 0.01, "num_mels": 2, "max_damaged": -1, "val_frac": 0.9, "speaker": "(", "num_clips": 3}
    with pytest.raises(ConfigError) as caught:
        datasets(cache_dir=str(tmp_path), **wrong)
    assert [fault.where for fault in caught.value.faults] == [f"workload.data.{name}" for name in wrong]
    with pytest.raises(ConfigError, match="has not one group"):
        datasets(cache_dir=str(tmp_path), speaker="abc")
    with pytest.raises(ConfigError, match="sample_rate"):
        datasets(cache_dir=str(tmp_path), sample_rate=3)


@pytest.mark.slow
def test_it_learns_the_embedded_words(tmp_path):
    """One pass over the clips: far above what guessing gives."""
    torch.manual_seed(0)
    data = datasets(num_clips=1200, cache_dir=str(tmp_path))
    model = ClipClassifier(**data.model_args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.005)
    for epoch in range(3):
        for step, indices in enumerate(torch.randperm(len(data.train)).split(16)):
            rng = SampleRng(0, epoch, step)
            optimizer.zero_grad()
            model.loss(data.train.on_device(data.train.fetch(indices, rng), rng)).loss.backward()
            optimizer.step()
    model.eval()
    data.evaluation.update(model, data.test.on_device(data.test.fetch(torch.arange(len(data.test))), SampleRng(0, 0)))
    assert data.evaluation.compute()["accuracy"] > 0.5
