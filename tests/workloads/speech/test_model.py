import pytest
import torch

from wellfed import ConfigError
from workloads.speech.model import ClipClassifier


def test_scores_and_loss():
    torch.manual_seed(0)
    model = ClipClassifier(40, 12).eval().requires_grad_(False)
    log_mel, label = torch.randn(6, 40, 98), torch.arange(6)
    found = model.loss({"log_mel": log_mel, "label": label})
    assert model(log_mel).shape == (6, 12)
    assert found.loss == pytest.approx(float(torch.nn.functional.cross_entropy(model(log_mel), label)))
    assert found.num_samples == 6
    louder = model(log_mel + torch.randn(6, 1, 1))
    torch.testing.assert_close(louder, model(log_mel), atol=1e-3, rtol=0)
    another_voice = model(log_mel + torch.randn(1, 40, 1))
    assert not torch.allclose(another_voice, model(log_mel), atol=1e-3)


@pytest.mark.parametrize("frames", [1, 2, 7, 40])
def test_what_is_put_around_a_clip_counts_for_nothing(frames):
    torch.manual_seed(0)
    model = ClipClassifier(40, 12).eval().requires_grad_(False)
    log_mel, is_sound = torch.randn(2, 40, 98), torch.zeros(2, 98, dtype=torch.bool)
    is_sound[:, 30 : 30 + frames] = True
    other = torch.where(is_sound[:, None], log_mel, -13.8)
    found = model(log_mel, is_sound)
    assert found.isfinite().all()
    torch.testing.assert_close(model(other, is_sound), found)


def test_all_faults_at_once():
    with pytest.raises(ConfigError) as caught:
        ClipClassifier(40, 12, base_channels=6, num_blocks=0, dropout=1.0)
    assert [fault.where.rpartition(".")[2] for fault in caught.value.faults] == [
        "base_channels",
        "num_blocks",
        "dropout",
    ]
