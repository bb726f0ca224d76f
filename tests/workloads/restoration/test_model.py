import pytest
import torch

from wellfed import ConfigError
from workloads.restoration.model import RestorationCNN


def awake(**arguments: object) -> RestorationCNN:
    """A model whose last layers are not zero, as after some training."""
    torch.manual_seed(0)
    model = RestorationCNN(**{"base_channels": 8, "num_blocks": 2} | arguments)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape))
    return model.eval()


def batch(count: int = 6, size: int = 24) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    clean = torch.rand(count, 3, size, size, generator=draw)
    return {"clean": clean, "degraded": clean + 0.1 * torch.randn(clean.shape, generator=draw)}


def test_an_untrained_model_gives_its_input_back():
    images = batch()["degraded"]
    assert torch.equal(RestorationCNN(base_channels=4, num_blocks=1)(images), images)


@pytest.mark.parametrize("size", [(1, 1), (7, 10), (16, 13)])
def test_images_of_any_size_keep_it(size: tuple[int, int]):
    model = awake()
    image = torch.rand(1, 3, *size)
    restored = model(image)
    assert restored.shape == image.shape
    assert not torch.equal(restored, image)


def test_what_lies_beyond_its_reach_changes_nothing():
    model = awake()
    image = torch.rand(1, 3, 80, 80)
    changed = image.clone()
    changed[..., 0, 0] += 1
    moved = (model(changed) - model(image)).abs().sum(1)[0] > 0
    assert moved[: model.reach + 1, : model.reach + 1].any()
    assert not moved[model.reach + 1 :].any()
    assert not moved[:, model.reach + 1 :].any()
    assert RestorationCNN(num_blocks=4).reach + 5 <= 32  # tiles of the evaluation are exact


def test_the_loss_is_the_mean_absolute_difference():
    model, one = awake(), batch()
    output = model.loss(one)
    restored = model(one["degraded"])
    assert output.loss.item() == pytest.approx((restored - one["clean"]).abs().mean().item(), rel=1e-5)
    errors = (restored - one["clean"]).square().flatten(1).mean(1)
    assert output.metrics["psnr"].item() == pytest.approx((-10 * errors.log10()).mean().item(), rel=1e-5)
    assert output.num_samples == 6


@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_the_loss_of_a_batch_is_the_weighted_mean_of_its_parts(weight: float):
    model, whole = awake(perceptual_weight=weight), batch()
    parts = [{name: values.narrow(0, *place) for name, values in whole.items()} for place in ((0, 2), (2, 4))]
    model.loss(whole).loss.backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    for part in parts:
        (model.loss(part).loss * len(part["clean"]) / 6).backward()
    for got, want in zip((p.grad for p in model.parameters()), expected, strict=True):
        assert torch.allclose(got, want, atol=1e-6)


def test_fixed_features_are_neither_trained_nor_in_checkpoints():
    plain, with_features = RestorationCNN(), RestorationCNN(perceptual_weight=0.5)
    assert [name for name, _ in with_features.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert with_features.state_dict().keys() == plain.state_dict().keys()


def test_all_faults_of_the_arguments_are_told_at_once():
    with pytest.raises(ConfigError) as told:
        RestorationCNN(base_channels=0, num_blocks=-1, perceptual_weight=-0.5, perceptual="vgg19")
    for name in ("base_channels", "num_blocks", "perceptual_weight", "perceptual"):
        assert f"workload.model.{name}: " in str(told.value)
