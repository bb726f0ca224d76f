"""Training: one optimizer step (``step``), its memory while a run lasts (``memory``), Lightning's loop around it.

Start from `step/train_step.py`, and `lightning/trainer.py` for the loop.
"""
