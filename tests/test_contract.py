import torch

from wellfed.contract import Datasets, Features, LossOutput, TrainData


def test_a_map_style_set_is_train_data_and_an_iterable_is_not():
    assert isinstance([1, 2], TrainData)
    assert not isinstance(iter([1]), TrainData)


def test_what_may_be_left_out():
    output = LossOutput(torch.tensor(1.0))
    assert (dict(output.metrics), output.num_samples) == ({}, None)
    data = Datasets([1])
    assert (data.val, data.test, data.collate, data.evaluation, dict(data.model_args), data.notes) == (
        (None, None, None, None, {}, ())
    )
    assert not Features(1, 4, lambda indices: indices).trainable
