"""Restores photographs that are noisy, blurred or small.

Covers images as uint8 pixels in one memory-mapped file, crops of them to train on, tiles of whole ones to evaluate on.
It is independent of Lightning, devices, workers and logging. Start from `workloads.restoration.data.datasets` and
`workloads.restoration.model.RestorationCNN`; README.md is the card.
"""
