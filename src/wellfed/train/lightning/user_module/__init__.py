"""Adds features of plain models to a user's LightningModule; reads the data of a LightningDataModule.

Start from `additions`: ``trainer.on_nan``, ``gpu.compile``, out-of-memory errors, parts of a batch. `data_module` takes
the data sets out of either class.
"""
