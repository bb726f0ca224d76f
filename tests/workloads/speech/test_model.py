import pytest
import torch

from wellfed.errors import ConfigError
from workloads.speech.model import ClipClassifier


def test_scores_and_loss():
    torch.manual_seed(0)
    model = ClipClassifier(40, 12).eval().requires_grad_(False)
    log_mel, label = torch.randn(6, 40, 98), torch.arange(6)
    found = model.loss({"log_mel": log_mel, "label": label})
    assert model(log_mel).shape == (6, 12)
    assert found.loss == pytest.approx(float(torch.nn.functional.cross_entropy(model(log_mel), label)))
    assert found.num_samples == 6
    # What is the same in all of a clip (the microphone, the volume) is taken out.
    torch.testing.assert_close(model(log_mel + torch.randn(1, 40, 1)), model(log_mel), atol=1e-3, rtol=0)


def test_a_clip_is_judged_alone():
    model = ClipClassifier(40, 12).eval()
    log_mel = torch.randn(4, 40, 50)
    torch.testing.assert_close(model(log_mel)[2:3], model(log_mel[2:3]), atol=1e-5, rtol=0)


def test_all_faults_at_once():
    with pytest.raises(ConfigError) as caught:
        ClipClassifier(40, 12, base_channels=6, num_blocks=0, dropout=1.0)
    assert [fault.where.rpartition(".")[2] for fault in caught.value.faults] == [
        "base_channels",
        "num_blocks",
        "dropout",
    ]
