"""Decides every number that a run needs, with a reason. Pure: recorded facts in, decisions out.

    device                    accelerator, precision, budget: before any data is read
    decide                    all other numbers, by the files below
      loader, backend         who builds batches; loader_checks, ready_batches: faults, warnings, room for batches
      memory                  features and checkpointing by rules of thumb
      budget                  what fits the budget, by the predictions of predict/
      micro_batch             the micro-batch: an ordered list of what decides it
    run_plan                  the plan and the facts it is made of
    nodes, examination        whether the ranks fit together; what the machine lacks (``wellfed doctor``)

Needs no GPU, no torch (but in predict/) and no Lightning. Start from `device.plan_device` and `decide.plan_run`.
"""
