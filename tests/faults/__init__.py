"""Plants faults in real runs, and checks that each run survives and makes no false claim: `make faults`.

Start reading at `cases.FAULTS`. `plants` has the ways to plant a fault, `damages` the changes of files, `examples` the
workloads on a user's data, `planted` the user's code that fails, `harness` the checks. `kills` is
`make kills`: it kills runs at random moments, and `killed` is the training in them.
"""
