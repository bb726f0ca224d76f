"""Threads and CPU time of the training process."""

import threading
import time
from types import SimpleNamespace

import torch

from wellfed.train.lightning.callbacks.process_watch import ProcessWatch


def watched(during):
    found = []
    watch, model = ProcessWatch(found.append), torch.nn.Linear(3, 2)
    model.bias.requires_grad_(requires_grad=False)
    for _ in range(3):
        watch.on_train_batch_end(SimpleNamespace(), model, None, None, 0)
    during()
    watch.on_train_end(SimpleNamespace(), model)
    (entry,) = found
    return entry


def test_a_thread_that_is_at_work_is_named_with_its_cores():
    ended = threading.Event()

    def burn():
        while not ended.is_set():
            pass

    threads = [threading.Thread(target=burn, name="refresh"), threading.Thread(target=ended.wait, name="waits")]
    own = threading.Thread(target=burn, name="wellfed-loader")
    for thread in (*threads, own):
        thread.start()
    try:
        found = watched(lambda: time.sleep(1.0))  # on a busy machine threads wait for a core
    finally:
        ended.set()
    assert [one["name"] for one in found["busy_threads"]] == ["refresh"]
    assert 0.05 < found["busy_threads"][0]["cores"] < 1.2


def test_what_is_trained_is_counted():
    found = watched(lambda: None)
    assert (found["parameter_tensors"], found["parameter_values"], found["parameter_bytes"]) == (1, 6, 24)
    assert found["torch_threads"] == torch.get_num_threads()
    assert found["busy_threads"] == []
