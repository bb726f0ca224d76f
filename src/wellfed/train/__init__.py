"""Trains: one optimizer step (``step``), device memory during a run (``memory``), a plain model's metrics and schedule
(``plain_model``), the loop for plain models (``loop``), and Lightning's Trainer for all others (``guest``).

Start from `loop/training.py` and `step/train_step.py`.
"""
