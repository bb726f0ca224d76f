"""Restores photographs that are noisy, blurred or small.

Knows images as uint8 pixels in one memory-mapped file, crops of them to train on, tiles of whole ones to evaluate on.
Must not know Lightning, devices, workers or logging. Start from `workloads.restoration.data.datasets` and
`workloads.restoration.model.RestorationCNN`; README.md is the card.
"""
