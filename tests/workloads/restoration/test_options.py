"""The experiments have the numbers that they are named for."""

import pytest

from wellfed.config.compose import compose


@pytest.mark.parametrize(
    ("experiment", "numbers", "workers"),
    [
        ("starved", (16, 32, 4, 128), 0),
        ("light", (16, 64, 6, 128), 6),
        ("16gb", (32, 96, 8, 192), 8),
        ("24gb", (64, 128, 12, 256), 12),
    ],
)
def test_batch_channels_blocks_and_patch(experiment: str, numbers: tuple[int, ...], workers: int):
    config = compose([f"experiment=restoration_{experiment}"]).config
    model, data = config.workload.model, config.workload.data
    found = config.workload.effective_batch_size, model["base_channels"], model["num_blocks"], data["patch_size"]
    assert found == numbers
    assert config.loader.num_workers == workers
    assert (model["perceptual_weight"] > 0) == (experiment in ("16gb", "24gb"))
