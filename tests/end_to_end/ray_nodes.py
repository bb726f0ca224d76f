"""Runs a Ray cluster on this machine for a test, in a process of its own: a line of standard input is a command.

python ray_nodes.py 2        starts two nodes of one CPU each, prints the address
add                          one node more
remove                       the last node goes, with all that runs there
"""

import sys

from ray.cluster_utils import Cluster

SMALL = {"num_cpus": 1, "object_store_memory": 80_000_000, "include_dashboard": False}


def main() -> None:
    """Until standard input ends."""
    cluster = Cluster(initialize_head=True, head_node_args=SMALL)
    try:
        added = [cluster.add_node(**SMALL) for _ in range(int(sys.argv[1]) - 1)]
        cluster.wait_for_nodes()
        print(f"address {cluster.address}", flush=True)
        for line in sys.stdin:
            if line.strip() == "add":
                added.append(cluster.add_node(**SMALL))
            else:
                cluster.remove_node(added.pop(), allow_graceful=False)
            print(f"done {line.strip()}", flush=True)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
