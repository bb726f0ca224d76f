import subprocess
import sys
from pathlib import Path

import torch

import wellfed
from wellfed.contract import Datasets, Features, LossOutput, TrainData


def test_it_imports_without_torch():
    code = "import sys, wellfed.contract; print('torch' in sys.modules)"
    source = {"PYTHONPATH": str(Path(wellfed.__file__).parents[1])}
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=source).stdout == "False\n"


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
