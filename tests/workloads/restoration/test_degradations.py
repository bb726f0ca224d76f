import pytest
import torch

from wellfed import ConfigError, SampleRng
from workloads.restoration.degradations import TASKS, Degradation, blur


def clean(count: int = 6, size: int = 32) -> torch.Tensor:
    return torch.rand(count, 3, size, size, generator=torch.Generator().manual_seed(0))


def noise(key: torch.Tensor, *, seed: int = 0, epoch: int = 0, size: int = 32, sigma: float = 25.0) -> torch.Tensor:
    images = clean(len(key), size)
    return Degradation(sigma=sigma)(images, key, SampleRng(seed, epoch)) - images


def test_noise_has_the_spread_that_is_asked_for_and_is_white():
    values = noise(torch.arange(40), sigma=50.0) * 255
    assert values.mean().item() == pytest.approx(0, abs=1.0)
    assert values.std().item() == pytest.approx(50, rel=0.02)
    flat = values.flatten(1)
    beside = (flat[:, 1:] * flat[:, :-1]).mean() / values.var()
    assert abs(beside.item()) < 0.02
    of_others = torch.corrcoef(flat) - torch.eye(40)
    assert of_others.abs().max() < 0.1  # no two samples have the same noise, nor one the other's negative


def test_noise_belongs_to_seed_epoch_and_key_alone():
    key = torch.tensor([3, 9, 4])
    whole = noise(key)
    assert torch.allclose(noise(key[1:2])[0], whole[1], atol=1e-6)
    assert not torch.allclose(noise(key, epoch=1), whole, atol=0.01)
    assert not torch.allclose(noise(key, seed=1), whole, atol=0.01)


@pytest.mark.parametrize("task", TASKS)
def test_evaluation_images_keep_their_noise(task: str):
    image = (clean(1, 33)[0, :, :, :30] * 255).byte()
    first = Degradation(task).for_evaluation(image, 4)
    assert first.dtype == torch.float32
    assert first.shape == image.shape
    assert torch.equal(first, Degradation(task).for_evaluation(image, 4))
    assert torch.equal(first, Degradation(task).for_evaluation(image, 5)) == (task == "super_resolve")
    assert not torch.allclose(first, image.float() / 255, atol=0.01)


def test_blur_keeps_the_mean_and_spreads_a_point():
    point = torch.zeros(1, 3, 31, 31)
    point[..., 15, 15] = 1
    spread = blur(point, 1.6)
    place = torch.arange(31.0) - 15
    assert spread.sum().item() == pytest.approx(3, rel=1e-5)
    assert (spread[0, 0].sum(0) * place**2).sum().item() == pytest.approx(1.6**2, rel=0.03)
    flat = torch.full((1, 3, 20, 20), 0.3)
    assert torch.allclose(blur(flat, 1.6), flat)


def test_all_faults_of_the_arguments_are_told_at_once():
    with pytest.raises(ConfigError) as told:
        Degradation("sharpen", sigma=300, blur_sigma=0, scale=1)
    for name in ("task", "sigma", "blur_sigma", "scale"):
        assert f"workload.data.{name}: " in str(told.value)
    with pytest.raises(ConfigError, match="nothing to remove"):
        Degradation("denoise", sigma=0)
