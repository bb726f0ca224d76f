"""A reference script of image classification: functions for an epoch and for its evaluation, arguments."""

import argparse
import random
import time

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, default_collate


class Pictures(Dataset):
    """Pictures of noise, whose reading takes ``read_ms``."""

    def __init__(self, number, read_ms):
        self.number, self.read_ms = number, read_ms

    def __len__(self):
        return self.number

    def __getitem__(self, index):
        time.sleep(self.read_ms / 1e3)
        generator = torch.Generator().manual_seed(index)
        flip = random.random() < 0.5 or np.random.rand() < 0.1 or torch.rand(()) < 0.1
        picture = torch.rand(3, 16, 16, generator=generator)
        return picture.flip(-1) if flip else picture, index % 4


def collate(samples):
    return default_collate(samples)


def train_one_epoch(model, criterion, optimizer, loader, device, epoch, args):
    model.train()
    for i, (image, target) in enumerate(loader):
        image, target = image.to(device), target.to(device)
        loss = criterion(model(image), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i % 10 == 0:
            print(f"epoch {epoch} [{i}] loss {loss.item():.5f}")


def evaluate(model, criterion, loader, device):
    model.eval()
    correct = 0
    with torch.inference_mode():
        for image, target in loader:
            image, target = image.to(device), target.to(device)
            correct += (model(image).argmax(1) == target).sum().item()
    print(f"accuracy {correct / len(loader.dataset):.4f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--images", type=int, default=480)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--read-ms", type=float, default=0.0)
    parser.add_argument("--output")
    args = parser.parse_args()
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    options = {"num_workers": args.workers, "collate_fn": collate}
    train = DataLoader(Pictures(args.images, args.read_ms), batch_size=args.batch_size, shuffle=True, **options)
    val = DataLoader(Pictures(64, 0.0), batch_size=32)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1), nn.Flatten(), nn.LazyLinear(4)
    ).to(device)
    model(torch.zeros(2, 3, 16, 16, device=device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    for epoch in range(args.epochs):
        train_one_epoch(model, nn.CrossEntropyLoss(), optimizer, train, device, epoch, args)
        scheduler.step()
        evaluate(model, nn.CrossEntropyLoss(), val, device)
        if args.output:
            torch.save(model.state_dict(), args.output)
    print("draws", random.random(), np.random.rand(), torch.rand(()).item())


if __name__ == "__main__":
    main()
