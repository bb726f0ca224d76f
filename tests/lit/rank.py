"""One of several processes that train a tiny workload together; run by `tests.lit.ranks.train_ranks`.

``python -m tests.lit.rank SETTINGS`` with the environment that torchrun would give; leaves ``rank<n>.pt`` in the folder
of the settings: weights, events, figures, the peak of its card's tensors, or the error that ended it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from tests.lit import encoded, tiny
from wellfed.errors import OutOfMemoryExhausted
from wellfed.lit import trainer as lit
from wellfed.lit.callbacks.figures import Figures
from wellfed.lit.module import StepModule, StepOptions
from wellfed.memory.ladder import MicroBatches


class Deep(tiny.TinyModel):
    """Repeats a block; fails where it is told to."""

    def __init__(self, fails: list[list[int]], width: int, dropout: float) -> None:
        super().__init__(dropout)
        self.register_buffer("count", torch.zeros(()))
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(tiny.WIDTH, tiny.WIDTH) for _ in range(2))
        self.large = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(tiny.WIDTH, width), torch.nn.Linear(width, tiny.WIDTH))
            for _ in range(2)
        )
        self.fails = fails

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        x = batch["x"]
        for block in [*self.blocks, *self.large]:
            x = x + 0.1 * block(x)
        return self.net(x)

    def loss(self, batch: Any) -> Any:
        output = super().loss(batch)
        self.count += 1
        rank = int(os.environ["RANK"])
        for failing_rank, call, above in self.fails:
            if rank == failing_rank and self.calls >= call and len(batch["x"]) > above:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")
        return output


def main(settings: dict[str, Any]) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(3)
    model = Deep(settings.get("fails", []), settings.get("width", 8), settings.get("dropout", 0.0))
    events: list[Any] = []
    data = tiny.TinyData(settings.get("samples", 70))
    rates = {"lr": settings.get("lr", 0.05)}
    module = StepModule(
        model,
        train_data=data,
        evaluation=None,
        eval_data={"val": data, "test": data},
        features=None,
        micro=MicroBatches(settings["micro"]),
        options=StepOptions(seed=1, retry_on_oom=settings.get("retry", True)),
        make_optimizer=lambda model: torch.optim.SGD(model.parameters(), momentum=0.9, **rates),
        lr_factor=lambda step: 1.0,
        on_event=lambda kind, **facts: events.append((kind, facts)),
    )
    stages: list[Any] = []
    if settings.get("staged"):  # without dropout, which ranks draw apart
        module, changes = encoded.staged(
            lambda kind, **facts: events.append((kind, facts)), retry_on_oom=settings.get("retry", True)
        )
        module.model.encoder[2].p = 0.0
        data, stages = encoded.Rows(), [changes]
    names = ("accelerator", "devices", "strategy", "precision", "max_steps", "gradient_clip", "validate_every_steps")
    given = {name: settings[name] for name in names if name in settings}
    loader = tiny.loader(settings.get("batch_size", 32), data=data, rank=rank, world_size=world)
    rows: list[Any] = []
    figures = Figures(lambda split, values, **_: rows.append((split, dict(values))), every=1, stop_on_nan=True)
    trainer = lit.make_trainer(tiny.options(**given), [*stages, figures], Path(settings["folder"]))
    found: dict[str, Any] = {"broadcasts": 0}
    broadcast = torch.distributed.broadcast

    def counted(*arguments: Any, **named: Any) -> Any:
        found["broadcasts"] += 1
        return broadcast(*arguments, **named)

    torch.distributed.broadcast = counted
    try:
        evaluated = tiny.eval_loader(16) if "validate_every_steps" in settings else None
        lit.fit(trainer, module, loader, evaluated, None)
        found["peak"] = torch.cuda.memory_stats().get("requested_bytes.all.peak") if torch.cuda.is_available() else None
    except OutOfMemoryExhausted as error:
        found["error"] = str(error)
    else:
        path = Path(settings["folder"]) / "weights.ckpt"
        trainer.save_checkpoint(path)
        state = torch.load(path, map_location="cpu", weights_only=True)["state_dict"]
        found["weights"] = torch.cat([state[name].flatten().float() for name in sorted(state) if "count" not in name])
    torch.save(
        {**found, "events": events, "rows": rows, "micro": module.micro.tried},
        Path(settings["folder"]) / f"rank{rank}.pt",
    )


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
