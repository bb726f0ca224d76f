import copy
import pickle

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from wellfed import ConfigError, SampleRng
from workloads.restoration.degradations import BANK_NUMBERS, TASKS, Degradation, blur, shrink_and_enlarge


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


def test_large_images_find_a_larger_bank():
    size = 1 + int((BANK_NUMBERS / 3) ** 0.5)
    values = noise(torch.tensor([0]), size=size)
    assert values.std().item() == pytest.approx(25 / 255, rel=0.02)


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


def test_a_coarse_image_keeps_slopes_and_loses_stripes():
    slope = torch.linspace(0, 1, 31).expand(1, 3, 29, 31)
    stripes = (torch.arange(30) % 2).float().expand(1, 3, 30, 30)
    assert torch.allclose(shrink_and_enlarge(slope, 2)[..., 4:-6], slope[..., 4:-6], atol=0.01)
    assert shrink_and_enlarge(stripes, 2)[..., 4:-4].std() < 0.05
    assert shrink_and_enlarge(slope, 3).shape == slope.shape


def test_without_a_sigma_each_task_has_its_usual_noise():
    assert [Degradation(task).sigma for task in TASKS] == [25, 2, 0]


def test_a_pickled_one_does_the_same_and_is_small():
    degradation = Degradation()
    before = degradation(clean(), torch.arange(6), SampleRng(0, 0))
    sent = pickle.dumps(degradation)
    assert len(sent) < 1000
    assert torch.equal(pickle.loads(sent)(clean(), torch.arange(6), SampleRng(0, 0)), before)


def test_a_copy_keeps_to_itself_what_it_makes():
    degradation = Degradation()
    with FakeTensorMode(allow_non_fake_inputs=True):
        rehearsed = copy.copy(degradation)
        assert rehearsed(torch.rand(2, 3, 8, 8), torch.arange(2), SampleRng(0, 0)).shape == (2, 3, 8, 8)
    assert type(degradation(clean(), torch.arange(6), SampleRng(0, 0))) is torch.Tensor


def test_all_faults_of_the_arguments_are_told_at_once():
    with pytest.raises(ConfigError) as told:
        Degradation("sharpen", sigma=300, blur_sigma=0, scale=1)
    for name in ("task", "sigma", "blur_sigma", "scale"):
        assert f"workload.data.{name}: " in str(told.value)
    with pytest.raises(ConfigError, match="nothing to remove"):
        Degradation("denoise", sigma=0)
