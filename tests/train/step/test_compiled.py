"""A step that compiles, writes over its results, or can't be compiled."""

from typing import Any, ClassVar

import pytest
import torch

from tests.kit import loop, tiny
from wellfed.contract import LossOutput
from wellfed.train.step.loss import Loss
from wellfed.train.step.replicas import Ranks
from wellfed.train.step.totals import Totals


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own, on its way to inductor
def test_without_graphs_nothing_is_copied() -> None:
    totals, output = Totals(), 1.0 * torch.ones((), requires_grad=True)
    totals.add("loss", output, 1)
    assert totals._pending[0][1].data_ptr() == output.data_ptr()
    assert not Loss(tiny.TinyModel()).overwrites
    assert not Loss(tiny.TinyModel(), "default").overwrites
    assert all(Loss(tiny.TinyModel(), mode).overwrites for mode in ("reduce-overhead", "max-autotune"))


class OnePlace(Loss):
    """Returns its results, and gives its gradients, in one and the same place each time, as CUDA graphs do."""

    place: torch.Tensor | None = None

    def __call__(self, batch: Any) -> LossOutput:
        if OnePlace.place is not None:
            OnePlace.place.fill_(float("nan"))
        for weight in self._model.parameters():  # those that backward gave last, unless they were kept
            if weight.grad is not None and weight in OnePlace.given and weight.grad is OnePlace.given[weight]:
                weight.grad.fill_(float("nan"))
        output = self._model.loss(batch)
        OnePlace.place = output.metrics["rmse"].detach()
        return output

    given: ClassVar[dict[Any, torch.Tensor]] = {}


def test_losses_and_gradients_of_several_micro_batches_are_kept() -> None:
    plain, graphed = loop.model(micro=8), loop.model(micro=8)
    graphed._loss = OnePlace(graphed.model)
    graphed._loss.overwrites = True

    def note(weight: torch.Tensor) -> None:
        OnePlace.given.setdefault(weight, weight.grad)

    for weight in graphed.model.parameters():
        weight.register_post_accumulate_grad_hook(note)
    rows: list[list[dict[str, float]]] = []
    for module in (plain, graphed):
        rows.append([])
        OnePlace.given.clear()
        loop.fit(module, figures=loop.figures(rows[-1], stops_on_nan=False), max_steps=1)
    assert rows[0] == rows[1]
    assert torch.equal(loop.weights(plain), loop.weights(graphed))


def backward_without_compiler(self: Ranks, loss: torch.Tensor) -> None:
    """Takes the C++ compiler away before the first backward pass, which is compiled then."""
    torch._inductor.config.cpp.cxx = ("a compiler that is not there",)
    loss.backward()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled:UserWarning")
def test_a_backward_pass_that_can_not_be_compiled_names_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ranks, "backward", backward_without_compiler)
    with torch._inductor.config.patch({"force_disable_caches": True, "cpp.cxx": torch._inductor.config.cpp.cxx}):
        placed = loop.model(compile_mode="default", micro=8)
        with pytest.raises(Exception, match=r"C\+\+ compiler") as caught:
            loop.fit(placed, max_steps=3)
    assert any("gpu.compile=none runs it without torch.compile" in note for note in caught.value.__notes__)
