"""Classifies each pixel of a hyperspectral scene from the spectra in a small patch around it.

The scene is one padded cube in a mapped file, and patches are views of it. The split keeps test pixels out of training
patches. Uses no Lightning, devices, workers or logging. Start from `workloads.hyperspectral.data.datasets` and
`workloads.hyperspectral.model.SpectralPatchCNN`; README.md is the card.
"""
