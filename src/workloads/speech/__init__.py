"""Recognises the word in a short recording.

Knows clips of sound in tar shards or folders, log-mel spectrograms of them, and how to cut audio to one length. Must
not know Lightning, devices, workers or logging. Start from `workloads.speech.data.datasets` and
`workloads.speech.model.ClipClassifier`; README.md is the card.
"""
