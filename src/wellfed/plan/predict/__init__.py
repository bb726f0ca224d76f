"""Predicts the device memory of a training step, and finds the largest micro-batch that fits.

    rehearsal -> steps on fake tensors (cuda_emulation, rnn_reserve), counted by memory_tracker: on an absent card
              -> peak: their memory as a function of the micro-batch
    size_fit  -> size_search: real steps instead, and the sizes to try: on this card

Needs no Lightning, configuration or loaders. Start from `peak.predicted_peak`, which needs no torch, and from
`rehearsal.measure`, which makes the footprint.
"""
