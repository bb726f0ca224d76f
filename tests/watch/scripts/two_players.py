"""A GAN: two models, two optimizers, two backward passes for each batch."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
maker = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
critic = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
of_maker = torch.optim.Adam(maker.parameters(), lr=1e-3)
of_critic = torch.optim.Adam(critic.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(torch.randn(640, 8)), batch_size=16, shuffle=True)
criterion = nn.BCEWithLogitsLoss()
for _epoch in range(2):
    for (real,) in loader:
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        fake = maker(torch.randn(len(real), 4))
        of_critic.zero_grad()
        loss = criterion(critic(real), ones) + criterion(critic(fake.detach()), zeros)
        loss.backward()
        of_critic.step()
        of_maker.zero_grad()
        criterion(critic(fake), ones).backward()
        of_maker.step()
print(f"done {loss.item():.6f}")
if len(sys.argv) > 1:
    torch.save([maker.state_dict(), critic.state_dict()], sys.argv[1])
