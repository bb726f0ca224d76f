"""One of several processes that train a tiny workload together; run by `tests.kit.ranks.train_ranks`.

``python -m tests.kit.rank SETTINGS`` with the environment that torchrun would give; leaves ``rank<n>.pt`` in the folder
of the settings: weights, events, figures, the peak of its card's tensors, or the error that ended it.
"""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.kit import loop, tiny
from wellfed.errors import OutOfMemoryExhausted
from wellfed.train.loop.figures import Figures
from wellfed.train.loop.place import Place
from wellfed.train.loop.placed_model import PlacedModel
from wellfed.train.memory.step_down import MicroBatches
from wellfed.train.step.train_step import StepOptions


@dataclass
class Lack:
    """Lack of memory: its place, the rank, the first call of the model and the most samples that fit."""

    place: str = ""
    rank: int = 0
    since: int = 0
    above: int = 0
    calls: int = 0
    """Calls of the model so far."""

    def is_at(self, place: str, size: int) -> bool:
        """Returns whether memory is lacking there for ``size`` samples."""
        is_here = place == self.place and self.rank == int(os.environ["RANK"])
        return is_here and self.calls >= self.since and size > self.above

    def come_to(self, place: str, device: torch.device, size: int = 1000) -> None:
        """Raises the error of a lack of memory, if this is its place."""
        if not self.is_at(place, size):
            return
        if device.type == "cuda":
            torch.empty(2**30, dtype=torch.uint8, device=device)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")


class AsksInBackward(torch.autograd.Function):
    """Gradients of what comes after it are there when it asks for memory."""

    @staticmethod
    def forward(context: Any, hidden: torch.Tensor, lack: Lack) -> torch.Tensor:
        context.lack = lack
        return hidden.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        context.lack.come_to("backward", gradient.device, len(gradient))
        return gradient, None


class Momentum(torch.optim.SGD):
    """Asks for memory before its step, or when it has changed some of it."""

    lack: Lack

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        first = self.param_groups[0]["params"][0]
        self.lack.come_to("step", first.device)
        if self.lack.is_at("within step", 1000):
            with torch.no_grad():
                first.add_(1.0)
        self.lack.come_to("within step", first.device)
        super().step()
        return loss


class Deep(tiny.TinyModel):
    """Repeats a block; runs out of memory where it is told to."""

    def __init__(self, lack: Lack, width: int, dropout: float) -> None:
        super().__init__(dropout)
        self.register_buffer("count", torch.zeros(()))
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(tiny.WIDTH, tiny.WIDTH) for _ in range(2))
        self.large = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(tiny.WIDTH, width), torch.nn.Linear(width, tiny.WIDTH))
            for _ in range(2)
        )
        self.lack = lack

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        x = batch["x"]
        for block in [*self.blocks, *self.large]:
            x = x + 0.1 * block(x)
        return self.net(AsksInBackward.apply(x, self.lack))

    def loss(self, batch: Any) -> Any:
        output = super().loss(batch)
        self.count += 1
        self.lack.calls = self.calls
        self.lack.come_to("forward", batch["x"].device, len(batch["x"]))
        return output


class Masked(Deep):
    """The loss is a mean over the samples that count: NaN where none does."""

    def loss(self, batch: Any) -> Any:
        output = super().loss(batch)
        output.loss = (self(batch) - batch["y"])[batch["counts"]].square().mean()
        output.metrics = {"rmse": output.loss.sqrt()}
        return output

    def loss_weight(self, batch: Any) -> int:
        return int(batch["counts"].sum())


class Few(tiny.TinyData):
    """One sample in ten counts."""

    def fetch(self, indices: torch.Tensor, rng: Any) -> Any:
        return {**super().fetch(indices, rng), "counts": indices % 10 == 0}


def main(settings: dict[str, Any]) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(3)
    lack = Lack(**settings.get("lack", {}))
    is_masked = settings.get("masked", False)
    model = (Masked if is_masked else Deep)(lack, settings.get("width", 8), settings.get("dropout", 0.0))
    events: list[Any] = []
    data = (Few if is_masked else tiny.TinyData)(settings.get("samples", 70))
    rates = {"lr": settings.get("lr", 0.05)}
    where = {name: settings[name] for name in loop.PLACE if name in settings}
    placed = PlacedModel(
        model,
        Place(**where),
        StepOptions(
            gradient_clip=settings.get("gradient_clip"),
            seed=1,
            on_oom="retry" if settings.get("retry", True) else "fail",
            may_adapt=settings.get("may_adapt", True),
        ),
        train_data=data,
        eval_data={"val": data, "test": data},
        micro=MicroBatches(settings["micro"]),
        make_optimizer=lambda model: Momentum(model.parameters(), momentum=0.9, foreach=True, **rates),
        lr_factor=lambda step: 1.0,
        on_event=lambda kind, **facts: events.append((kind, facts)),
    )
    Momentum.lack = lack
    limits = {name: settings[name] for name in loop.LIMITS if name in settings}
    batches = tiny.loader(settings.get("batch_size", 32), data=data, rank=rank, world_size=world)
    rows: list[Any] = []
    figures = Figures(lambda split, values, **_: rows.append((split, dict(values))), every=1, stops_on_nan=True)
    found: dict[str, Any] = {"flags": 0}
    broadcast = torch.distributed.broadcast

    def counted(sent: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        found["flags"] += not sent.is_floating_point()  # those are buffers
        return broadcast(sent, *arguments, **named)

    torch.distributed.broadcast = counted
    try:
        evaluated = tiny.eval_loader(16) if "validate_every_steps" in settings else None
        loop.fit(placed, batches, figures=figures, validation=evaluated, **limits)
        found["peak"] = torch.cuda.memory_stats().get("requested_bytes.all.peak") if torch.cuda.is_available() else None
    except (OutOfMemoryExhausted, RuntimeError) as error:  # the second where the other rank has ended
        found |= {"error": str(error), "changes": getattr(error, "changes", None)}
    else:
        path, state = Path(settings["folder"]) / "weights.pt", placed.whole.state_dict()
        if rank == 0:
            torch.save(state, path)
        torch.distributed.barrier()
        state = torch.load(path, map_location="cpu", weights_only=True)
        found["weights"] = torch.cat([state[name].flatten().float() for name in sorted(state) if "count" not in name])
    torch.save(
        {
            **found,
            "drawn": torch.rand(4),
            "events": events,
            "seen": model.seen,
            "rows": rows,
            "micro": placed.micro.tried,
        },
        Path(settings["folder"]) / f"rank{rank}.pt",
    )


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
