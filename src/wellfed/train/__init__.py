"""Trains: one optimizer step (``step``), device memory during a run (``memory``), a plain model (``plain_model``), and
all uses of Lightning (``lightning``).

Start from `step/train_step.py`, then `plain_model/plain_training.py`, and `lightning/trainer.py` for the loop.
"""
