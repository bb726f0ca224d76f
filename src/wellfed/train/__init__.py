"""Trains: one optimizer step (``step``), its memory while a run lasts (``memory``), a plain model around both
(``plain_model``), and everything that uses Lightning (``lightning``).

Start from `step/train_step.py`, then `plain_model/plain_training.py`, and `lightning/trainer.py` for the loop.
"""
