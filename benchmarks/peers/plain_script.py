"""A plain PyTorch script with a planted fault; `benchmarks/peers_diagnosis.py` runs it.

python benchmarks/peers/plain_script.py --fault too_few_workers
wellfed watch benchmarks/peers/plain_script.py --fault too_few_workers
traceml run benchmarks/peers/plain_script.py --args --fault too_few_workers --traceml
python benchmarks/peers/plain_script.py --fault too_few_workers --change "DataLoader(num_workers=4)" --turns 3
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from parts import (
    CHECKPOINT,
    AfterSteps,
    Loss,
    Net,
    Settings,
    SlowSchedule,
    changed,
    loader_of,
    optimizer_of,
    rest,
    validation_loader,
    work,
)
from planted import ALL

TURN_STEPS = 40
"""Minimum steps of a training whose samples/s are compared."""


def validate(model: torch.nn.Module, loader: Any, device: torch.device) -> None:
    """Goes through the validation data."""
    model.eval()
    with torch.no_grad():
        for x, _ in loader:
            model(x.to(device))
    model.train()


def train(settings: Settings, *, has_traceml: bool = False) -> float:
    """Trains; returns the samples/s."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, loss_of, after_step = Net(settings).to(device), Loss(settings), AfterSteps(settings)
    optimizer, loader, val_loader = optimizer_of(model, settings), loader_of(settings), validation_loader(settings)
    schedule = SlowSchedule(optimizer, settings.schedule_ms) if settings.schedule_ms else None

    def traced() -> AbstractContextManager[Any]:
        if not has_traceml:
            return nullcontext()
        import traceml_ai

        return traceml_ai.trace_step(model)

    batches = step = 0
    began_s = time.perf_counter()
    for _ in range(settings.epochs):
        for x, y in loader:
            with traced():
                x, y = x.to(device), y.to(device)  # noqa: PLW2901
                batches += 1
                work(settings.augment_ms)
                loss = loss_of(model(x), y)
                loss.backward()
                if batches % settings.accumulate == 0:
                    work(settings.gradient_ms)
                    optimizer.step()
                    optimizer.zero_grad()
                    step += 1
                    if schedule is not None:
                        schedule.step()
                    after_step(model, x)
                    if settings.checkpoint_every and step % settings.checkpoint_every == 0:
                        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, CHECKPOINT)
                    if settings.validate_every and step % settings.validate_every == 0:
                        validate(model, val_loader, device)
        rest(settings.epoch_end_ms)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return batches * settings.batch / (time.perf_counter() - began_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fault", choices=ALL, required=True)
    parser.add_argument("--traceml", action="store_true", help="with the lines that TraceML needs in a plain loop")
    parser.add_argument("--change", help="typed advice to follow in every second training")
    parser.add_argument("--turns", type=int, default=0, help="trainings of each kind; prints their samples/s")
    given = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    settings = Settings(**ALL[given.fault].settings)
    if given.traceml:
        import traceml_ai

        traceml_ai.init(mode="auto")
    if not given.turns:
        train(settings, has_traceml=given.traceml)
        return
    other = changed(settings, given.change)
    interval = max(TURN_STEPS, other.validate_every, other.checkpoint_every)  # rarer pauses are there, too
    settings.steps = other.steps = min(settings.steps, interval)
    pairs = []
    for number in range(given.turns):
        rates = {name: train(one) for name, one in ((0, settings), (1, other))[:: -1 if number % 2 else 1]}
        pairs.append([rates[0], rates[1]])
    print(json.dumps({"pairs": pairs}))


if __name__ == "__main__":
    main()
