"""Recognises the word in a short recording.

Covers clips of sound in tar shards or folders, log-mel spectrograms of them, and how to cut audio to one length. It is
independent of Lightning, devices, workers and logging. Start from `workloads.speech.data.datasets` and
`workloads.speech.model.ClipClassifier`; README.md is the card.
"""
