"""On the embedded set a small model beats the degraded images after seconds."""

from pathlib import Path

import pytest
import torch
from torch import nn

from wellfed import Datasets, SampleRng
from workloads.restoration.data import datasets
from workloads.restoration.model import RestorationCNN


def trained(data: Datasets, steps: int) -> RestorationCNN:
    torch.manual_seed(0)
    model = RestorationCNN(base_channels=16, num_blocks=1)
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(steps):
        rng = SampleRng(0, step)
        indices = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(step))[:8]
        output = model.loss(data.train.on_device(data.train.fetch(indices, rng), rng))
        optimizer.zero_grad()
        output.loss.backward()
        optimizer.step()
        schedule.step()
    return model.eval()


def judged(data: Datasets, model: nn.Module) -> dict[str, float]:
    data.evaluation.reset()
    data.evaluation.update(model, data.val.fetch(torch.arange(len(data.val))))
    return data.evaluation.compute()


@pytest.mark.parametrize(
    ("task", "gain_db"),
    [
        ("denoise", 4.0),
        pytest.param("deblur", 0.4, marks=pytest.mark.slow),
        pytest.param("super_resolve", 0.2, marks=pytest.mark.slow),
    ],
)
def test_a_small_model_beats_its_input(task: str, gain_db: float, tmp_path: Path):
    data = datasets(task=task, num_images=24, val_frac=0.2, patch_size=32, cache_dir=str(tmp_path))
    untrained, found = (judged(data, trained(data, steps)) for steps in (0, 80))
    assert untrained["psnr"] == pytest.approx(untrained["psnr_degraded"], abs=1e-4)
    assert found["psnr"] > found["psnr_degraded"] + gain_db
    assert found["ssim"] > untrained["ssim"]
