"""Uses Lightning: its loop around our training step, and our callbacks.

Start from `trainer.fit` (one training) and `module.StepModule` (a plain model in it). `user_module` supports a user's
own LightningModule or LightningDataModule. For your own Trainer, use ``from wellfed import GPUCurves``.

    trainer      makes the Trainer              loop        an epoch of direct steps
    hooks        lists and calls hooks          prefetch    copies batches to the device ahead
    sanity       tries batches before training  ceiling     times steps without loading
    sharding     FSDP                           callbacks/  checkpoints/  user_module/
"""
