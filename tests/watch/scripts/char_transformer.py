"""A language model on characters in one file: batches cut out of an array by hand, accumulated gradients, estimates."""

import math
import os
import sys

import numpy as np
import torch
from torch import nn
from torch.nn import functional

block_size, batch_size, width, accumulation = 32, 4, 32, 2
max_iters, eval_interval, eval_iters, learning_rate = 60, 25, 4, 1e-3
torch.manual_seed(1337)
data = np.random.default_rng(0).integers(0, 64, 20_000).astype(np.uint16)
device = "cuda" if torch.cuda.is_available() else "cpu"


def get_batch():
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([torch.from_numpy(data[i : i + block_size].astype(np.int64)) for i in ix])
    y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + block_size].astype(np.int64)) for i in ix])
    return x.to(device), y.to(device)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        q, k, v = self.qkv(self.ln_1(x)).split(width, dim=2)
        x = x + self.proj(functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(64, width), nn.Embedding(block_size, width)
        self.h = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(width, 64)

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device))
        for block in self.h:
            x = block(x)
        logits = self.head(x)
        return logits, functional.cross_entropy(logits.view(-1, 64), targets.view(-1))


model = GPT().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)


@torch.no_grad()
def estimate_loss():
    model.eval()
    mean = sum(model(*get_batch())[1].item() for _ in range(eval_iters)) / eval_iters
    model.train()
    return mean


X, Y = get_batch()
for iter_num in range(max_iters):
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * (1 + math.cos(math.pi * iter_num / max_iters)) / 2
    if iter_num % eval_interval == 0:
        print(f"step {iter_num}: loss {estimate_loss():.4f}")
    for _ in range(accumulation):
        logits, loss = model(X, Y)
        X, Y = get_batch()
        (loss / accumulation).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
if len(sys.argv) > 1:
    torch.save({"model": model.state_dict(), "whole": model, "rng": torch.get_rng_state()}, sys.argv[1])
print(f"done, loss {loss.item():.6f}, {os.path.basename(sys.argv[0])}")
