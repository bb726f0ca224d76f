import pytest
import torch

from wellfed import ConfigError, Datasets, SampleRng, TrainData
from wellfed.cli.blank.data import Rows, datasets


def splits(data: Datasets) -> list[Rows]:
    return [data.train, data.val, data.test]


def test_the_splits_are_all_rows_once_and_the_same_again():
    data, again = datasets(num_rows=200), datasets(num_rows=200)
    assert [len(split) for split in splits(data)] == [160, 20, 20]
    assert data.model_args == {"num_inputs": 8, "num_classes": 4}
    assert len(torch.cat([split.inputs for split in splits(data)]).unique(dim=0)) == 200
    assert all(torch.equal(one.inputs, other.inputs) for one, other in zip(splits(data), splits(again), strict=True))


def test_a_batch_is_its_samples():
    train = datasets(num_rows=50).train
    assert isinstance(train, TrainData)
    batch = train.fetch(torch.tensor([3, 1]), SampleRng(0, 0))
    for place, index in enumerate((3, 1)):
        assert all(torch.equal(batch[name][place], value) for name, value in train[index].items())


def test_inputs_are_scaled_by_those_of_training():
    inputs = datasets().train.inputs
    assert inputs.dtype == torch.float32
    assert inputs.mean(0).abs().max() < 1e-5
    assert (inputs.std(0) - 1).abs().max() < 1e-4


@pytest.mark.parametrize("num_rows", [-1, 0, 9])
def test_too_few_rows_are_refused(num_rows: int):
    with pytest.raises(ConfigError, match=f"num_rows={num_rows}: are fewer than the 10"):
        datasets(num_rows=num_rows)
    assert len(datasets(num_rows=10).test) == 1
