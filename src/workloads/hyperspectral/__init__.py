"""Classifies each pixel of a hyperspectral scene from the spectra in a small patch around it.

Covers a scene as one padded cube in a mapped file, patches as views into it, and how pixels are split so that no test
pixel was seen in training. It is independent of Lightning, devices, workers and logging. README.md is the card. Start
from `workloads.hyperspectral.data.datasets` and `workloads.hyperspectral.model.SpectralPatchCNN`.
"""
