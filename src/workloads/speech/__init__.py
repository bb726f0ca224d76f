"""Recognises the word in a short recording.

Clips come from tar shards or folders, are cut to one length, and become log-mel spectrograms. Uses no Lightning,
devices, workers or logging.

Start from `workloads.speech.data.datasets` and `workloads.speech.model.ClipClassifier`.
README.md is the card.
"""
