"""Restores photographs that are noisy, blurred or small.

Images are uint8 pixels in one memory-mapped file. Training uses crops of them, evaluation tiles of whole images. Uses
no Lightning, devices, workers or logging. Start from `workloads.restoration.data.datasets` and
`workloads.restoration.model.RestorationCNN`; README.md is the card.
"""
