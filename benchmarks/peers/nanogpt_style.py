"""A language model of characters in one file, in the manner of nanoGPT: batches are cut from a memory map, gradients of
several of them are accumulated, the loss is estimated now and then. `benchmarks/peers_diagnosis.py --examples` runs it.
"""

import argparse
import math
import time
from contextlib import nullcontext

import numpy as np
import torch
from torch import nn
from torch.nn import functional

vocabulary, block_size, batch_size, width, heads, depth = 96, 64, 8, 96, 4, 3
max_iters, warmup_iters, accumulated, eval_interval, eval_iters, log_interval = 120, 20, 2, 40, 5, 10
learning_rate, min_lr, grad_clip = 1e-3, 1e-4, 1.0


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (one.view(b, t, heads, c // heads).transpose(1, 2) for one in self.qkv(self.norm_1(x)).split(c, 2))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.norm_2(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(block_size, width)
        self.blocks = nn.Sequential(*[Block() for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, x, y):
        hidden = self.blocks(self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device)))
        logits = self.head(self.norm(hidden))
        return logits, functional.cross_entropy(logits.view(-1, vocabulary), y.view(-1))


parser = argparse.ArgumentParser()
parser.add_argument("--traceml", action="store_true")
given = parser.parse_args()
traced = nullcontext
if given.traceml:
    import traceml_ai

    traceml_ai.init(mode="auto")
    traced = traceml_ai.trace_step

torch.manual_seed(1337)
device = "cuda" if torch.cuda.is_available() else "cpu"
np.random.default_rng(0).integers(0, vocabulary, 200_000).astype(np.uint16).tofile("train.bin")


def get_batch():
    data = np.memmap("train.bin", dtype=np.uint16, mode="r")
    starts = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([torch.from_numpy(data[i : i + block_size].astype(np.int64)) for i in starts])
    y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + block_size].astype(np.int64)) for i in starts])
    return x.to(device), y.to(device)


@torch.no_grad()
def estimate_loss(model):
    model.eval()
    mean = torch.tensor([model(*get_batch())[1].item() for _ in range(eval_iters)]).mean()
    model.train()
    return mean


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    coefficient = 0.5 * (1 + math.cos(math.pi * (it - warmup_iters) / (max_iters - warmup_iters)))
    return min_lr + coefficient * (learning_rate - min_lr)


model = Model().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))
x, y = get_batch()
began = time.time()
for it in range(max_iters):
    for group in optimizer.param_groups:
        group["lr"] = get_lr(it)
    if it % eval_interval == 0:
        print(f"step {it}: loss {estimate_loss(model):.4f}")
    with traced(model) if given.traceml else nullcontext():
        for _ in range(accumulated):
            _, loss = model(x, y)
            x, y = get_batch()
            (loss / accumulated).backward()
        nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    if it % log_interval == 0:
        print(f"iter {it}: loss {loss.item():.4f}, time {1e3 * (time.time() - began):.2f}ms")
        began = time.time()
