"""Runs the passes over the data of a run: training, validation, test and ceiling.

Start from `choice.passes_class`. `plain_passes` trains by the engine's loop, `guest_passes` under Lightning's Trainer;
both extend `base.RunPasses`. `ceiling` measures the rate without loading.
"""
