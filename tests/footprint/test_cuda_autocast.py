import pytest
import torch
from torch.nn import functional

from wellfed.footprint import cuda_autocast
from wellfed.footprint.cuda_autocast import cuda_autocast_lists

X = torch.randn(4, 8, 16, generator=torch.Generator().manual_seed(0))
LOW = torch.bfloat16


def saved(run):
    """Types and sizes of what is kept for the backward pass."""
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: kept.append(each) or each, lambda each: each):
        result = run()
    return result, [each.dtype for each in kept]


def test_the_lists_are_those_that_torch_has_registered_for_cuda():
    lists = (cuda_autocast.LOWER, cuda_autocast.FLOAT32, cuda_autocast.FLOAT32_RESULT, cuda_autocast.WIDEST)
    ours = [name for text in (*lists, cuda_autocast.AS_GIVEN) for name in text.split()] + list(cuda_autocast.NORM)
    assert len(ours) == len(set(ours))
    theirs = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
    assert {f"aten::{name}" for name in ours} == {name for name in theirs if name.startswith("aten::")}


@pytest.mark.parametrize(
    ("run", "dtype"),
    [
        (lambda x: functional.layer_norm(x, (16,)), torch.float32),
        (lambda x: functional.rms_norm(x, (16,)), torch.float32),
        (lambda x: x.softmax(-1), torch.float32),
        (lambda x: x.softmax(-1, dtype=LOW), LOW),
        (lambda x: functional.log_softmax(x, -1), torch.float32),
        (lambda x: x.logsumexp(-1), torch.float32),
        (lambda x: x**2, torch.float32),
        (lambda x: x.sum(), torch.float32),
        (lambda x: x.sum(1), torch.float32),
        (lambda x: x.norm(), torch.float32),
        (lambda x: x.norm(dim=1), torch.float32),
        (lambda x: x.cumsum(0), torch.float32),
        (lambda x: functional.huber_loss(x, x), torch.float32),
        (lambda x: functional.interpolate(x, scale_factor=2), torch.float32),
        (lambda x: functional.interpolate(x[None], scale_factor=2, mode="bilinear"), torch.float32),
        (lambda x: functional.cosine_similarity(x, x), torch.float32),
        (lambda x: x.float() @ x.mT.float(), LOW),
        (lambda x: torch.einsum("bij,bkj->bik", x.float(), x.float()), LOW),
        (lambda x: torch.addcmul(x, x, x.float()), torch.float32),
        (lambda x: torch.addcmul(x, x, x), LOW),
        (lambda x: functional.pad(x, (1, 1), mode="reflect"), LOW),  # the CPU's list has it, CUDA's has not
        (lambda x: torch.cat([x, x.float()]), torch.float32),
        (lambda x: x * 2, LOW),
        (torch.relu, LOW),
        (lambda x: x.double().sum(), torch.float64),
    ],
)
def test_operators_run_in_cudas_types(run, dtype):
    x = X.to(LOW)
    with cuda_autocast_lists(), torch.autocast("cpu", LOW):
        assert run(x).dtype == dtype


def test_cross_entropy_keeps_its_log_probabilities_in_the_lower_type():
    x, label = X.to(LOW).requires_grad_(), torch.zeros(4, 16, dtype=torch.long)
    with torch.autocast("cpu", LOW):
        assert saved(lambda: functional.cross_entropy(x, label))[1][0] == torch.float32  # all of it on a CPU
        with cuda_autocast_lists():
            loss, kept = saved(lambda: functional.cross_entropy(x, label))
    assert loss.dtype == torch.float32
    assert kept[0] == LOW
    loss.backward()
    assert x.grad.dtype == LOW


def test_without_autocast_nothing_changes_and_afterwards_all_is_as_it_was():
    x = X.to(LOW)
    with cuda_autocast_lists():
        assert x.softmax(-1).dtype == LOW
    with torch.autocast("cpu", LOW):
        assert x.softmax(-1).dtype == LOW
        assert functional.pad(x, (1, 1), mode="reflect").dtype == torch.float32
