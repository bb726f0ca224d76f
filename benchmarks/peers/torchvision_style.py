"""Image classification in the manner of torchvision's reference scripts: files in a folder a class, transforms in
the data set, an epoch and its evaluation as functions. `benchmarks/peers_diagnosis.py --examples` runs it.
"""

import argparse
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Folder(Dataset):
    """Pictures in files, by class."""

    def __init__(self, root, *, train):
        self.files = sorted(
            (path, number) for number, part in enumerate(sorted(root.iterdir())) for path in part.iterdir()
        )
        self.train = train

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        path, target = self.files[index]
        image = torch.from_numpy(np.load(path)["image"]).permute(2, 0, 1).float().div_(255)[None]
        if self.train:
            top, left = torch.randint(0, 32, (2,)).tolist()
            image = image[..., top : top + 128, left : left + 128]
            image = image.flip(-1) if torch.rand(()) < 0.5 else image
        image = nn.functional.interpolate(image, size=32, mode="bicubic", antialias=True)[0]
        return (image - 0.45) / 0.22, target


def write_files(root):
    """Writes small compressed pictures of noise."""
    draw = np.random.default_rng(0)
    for part in ("train", "val"):
        for target in range(4):
            place = root / part / str(target)
            place.mkdir(parents=True)
            for number in range(120 if part == "train" else 8):
                image = draw.integers(0, 32, (160, 160, 3), dtype=np.uint8)
                np.savez_compressed(place / f"{number}.npz", image=image)


def train_one_epoch(model, criterion, optimizer, loader, device, epoch, args):
    model.train()
    for i, (image, target) in enumerate(loader):
        began = time.time()
        with args.traced(model):
            image, target = image.to(device), target.to(device)  # noqa: PLW2901
            output = model(image)
            loss = criterion(output, target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            accuracy = (output.argmax(1) == target).float().mean()
        if i % 10 == 0:
            speed = len(image) / (time.time() - began)
            print(f"Epoch: [{epoch}] [{i}/{len(loader)}] loss {loss.item():.4f} acc1 {accuracy:.3f} img/s {speed:.0f}")


def evaluate(model, criterion, loader, device):
    model.eval()
    total = 0.0
    with torch.inference_mode():
        for image, target in loader:
            total += criterion(model(image.to(device)), target.to(device)).item()
    print(f"Test: loss {total / len(loader):.4f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--traceml", action="store_true")
    args = parser.parse_args()
    args.traced = lambda model: nullcontext()
    if args.traceml:
        import traceml_ai

        traceml_ai.init(mode="auto")
        args.traced = traceml_ai.trace_step
    torch.manual_seed(0)
    root, device = Path("pictures"), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    write_files(root)
    train = DataLoader(Folder(root / "train", train=True), batch_size=16, shuffle=True, num_workers=args.workers)
    val = DataLoader(Folder(root / "val", train=False), batch_size=16, num_workers=args.workers)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(256, 4),
    ).to(device)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)
    for epoch in range(args.epochs):
        train_one_epoch(model, criterion, optimizer, train, device, epoch, args)
        scheduler.step()
        evaluate(model, criterion, val, device)
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, "checkpoint.pth")


if __name__ == "__main__":
    main()
