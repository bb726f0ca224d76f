"""Adds to a user's LightningModule what plain models have; reads the data of a LightningDataModule.

Start from `additions`: ``trainer.on_nan``, ``gpu.compile``, out-of-memory errors. `accumulation` hands a module its
batches in parts, `rank_shares` weighs the gradients of ranks, `data_module` takes the data sets out of either class.
"""
