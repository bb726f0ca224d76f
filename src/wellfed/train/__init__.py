"""Trains: one optimizer step (``step``), device memory during a run (``memory``), a plain model (``plain_model``), and
all uses of Lightning (``lightning``).

Start from `loop/training.py`, the loop for plain models, and `step/train_step.py`; guests are in `guest/`.
"""
