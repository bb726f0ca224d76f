"""A loop of small steps, for the cost of a watch a step; `benchmarks/peers_diagnosis.py --cost` runs it.

Prints the CPU time of the training thread and of the process, and the wall time, in microseconds a step.
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

WARMUP, WIDTH, BATCH = 300, 32, 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", choices=["alone", "clock", "auto", "manual"], default="alone")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--out", required=True)
    given = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model: Any = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1)).to(device)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-3)
    data: Any = torch.randn(given.steps + WARMUP, BATCH, WIDTH)
    loader: Any = DataLoader(data, batch_size=None)
    traced, clock, backward = nullcontext, None, torch.Tensor.backward
    if given.mode in ("auto", "manual"):
        import traceml_ai

        traceml_ai.init(mode=given.mode)
        if given.mode == "manual":
            model, optimizer = traceml_ai.wrap_forward(model), traceml_ai.wrap_optimizer(optimizer)
            loader = traceml_ai.wrap_dataloader_fetch(loader)
            backward = lambda loss: traceml_ai.wrap_backward(loss).backward()  # noqa: E731
        traced = lambda: traceml_ai.trace_step(model)  # noqa: E731
    if given.mode == "clock":
        from wellfed.observe.timing.step_clock import BACKWARD, FORWARD, OPTIMIZER, OTHER, StepClock

        clock = StepClock()
        if device.type == "cuda":
            new_event: Any = partial(torch.cuda.Event, enable_timing=True)
            clock = StepClock(new_event=new_event, current_stream=torch.cuda.current_stream)
    batches, step = iter(loader), 0
    began = (0.0, 0.0, 0.0)
    while step < given.steps + WARMUP:
        if step == WARMUP:
            began = (time.thread_time(), time.process_time(), time.perf_counter())
        step += 1
        if clock is None:
            x = next(batches).to(device)
            with traced():
                loss = model(x).square().mean()
                backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            continue
        clock.ask()
        x = next(batches)
        clock.got()
        clock.copy_begins(0)
        x = x.to(device)
        clock.copied()
        clock.mark((FORWARD, clock.now_s()))
        loss = model(x).square().mean()
        clock.mark((BACKWARD, clock.now_s()))
        backward(loss)
        clock.mark((OPTIMIZER, clock.now_s()))
        optimizer.step()
        clock.mark((OTHER, clock.now_s()))
        if clock.end(step=step, samples=BATCH, micro_batch=BATCH, num_micro=1):
            clock.rows()
        optimizer.zero_grad()
    ended = (time.thread_time(), time.process_time(), time.perf_counter())
    names = ("thread_us", "process_us", "wall_us")
    found = {name: 1e6 * (b - a) / given.steps for name, a, b in zip(names, began, ended, strict=True)}
    with open(given.out, "w") as stream:
        json.dump(found, stream)


if __name__ == "__main__":
    main()
