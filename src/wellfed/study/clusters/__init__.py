"""Has orders done by processes on other machines, and tells what became of each.

    cluster.Cluster ┬ ray_cluster       the machines of a Ray cluster: a process a place, which stays for the next order
                    └ submitit_cluster  jobs that submitit sends to Slurm, or starts here: a process a job
                         └ keeper       what runs there: starts the process, hands over orders, brings answers back

Knows neither what an order says nor Hydra: an order and its answer are bytes. Start from ``cluster.Cluster``.
"""
