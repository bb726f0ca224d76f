"""Writes the metrics of a run to files and to the chosen loggers. A failing logger never ends a run.

Start from `journal.Journal`, which writes the files, and `sink.Sink`, the interface of loggers. `csv_table` writes
tables. `log_media` has `wellfed.log_image` and `wellfed.log_table`. `wandb_sink` and `lightning_loggers` open wandb,
TensorBoard, mlflow and csv.
"""
