from wellfed.observe.hardware.cgroup import CgroupLimits, cgroup_limits

GIB = 2**30


def tree(root, files):
    for path, text in files.items():
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    return cgroup_limits(root)


def test_no_cgroups_is_no_limit(tmp_path):
    assert cgroup_limits(tmp_path) == CgroupLimits(None, None, None)


def test_v2_takes_the_smallest_of_all_ancestors(tmp_path):
    limits = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/slurm/job_7/step_0",
            "sys/fs/cgroup/cgroup.controllers": "cpu memory",
            "sys/fs/cgroup/slurm/cpu.max": "800000 100000",
            "sys/fs/cgroup/slurm/memory.max": 64 * GIB,
            "sys/fs/cgroup/slurm/job_7/cpu.max": "250000 100000",
            "sys/fs/cgroup/slurm/job_7/memory.max": 16 * GIB,
            "sys/fs/cgroup/slurm/job_7/step_0/cpu.max": "max 100000",
            "sys/fs/cgroup/slurm/job_7/step_0/memory.max": "max",
            "sys/fs/cgroup/slurm/job_8/cpu.max": "10000 100000",
        },
    )
    assert limits.cpu_cores == 2.5
    assert limits.memory_bytes == 16 * GIB


def test_v2_inside_a_container_reads_the_mount_itself(tmp_path):
    # Without a cgroup namespace the path is the host's and does not exist here; with one it is "/".
    for path in ("/docker/3f9a", "/", "/../../elsewhere"):
        files = {
            "proc/self/cgroup": f"0::{path}",
            "sys/fs/cgroup/cpu.max": "150000 100000",
            "sys/fs/cpu.max": "1000 100000",  # beside the mount: not ours
            "sys/fs/cgroup/memory.max": 4 * GIB,
        }
        limits = tree(tmp_path, files)
        assert (limits.cpu_cores, limits.memory_bytes) == (1.5, 4 * GIB)


def test_v2_memory_high_binds_like_a_limit(tmp_path):
    files = {
        "proc/self/cgroup": "0::/job",
        "sys/fs/cgroup/job/memory.max": 16 * GIB,
        "sys/fs/cgroup/job/memory.high": 8 * GIB,
        "sys/fs/cgroup/job/memory.current": 3 * GIB,
    }
    limits = tree(tmp_path, files)
    assert (limits.memory_bytes, limits.memory_room_bytes) == (8 * GIB, 5 * GIB)
    assert tree(tmp_path, {"sys/fs/cgroup/job/memory.high": "max"}).memory_bytes == 16 * GIB


def test_unlimited_and_unreadable_values_are_no_limit(tmp_path):
    for text in ("max 100000", "", "garbage", "100000 0"):
        files = {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": text, "sys/fs/cgroup/memory.max": "max"}
        assert tree(tmp_path, files) == CgroupLimits(None, None, None)


def test_room_counts_droppable_cache_as_free(tmp_path):
    files = {
        "proc/self/cgroup": "0::/job",
        "sys/fs/cgroup/job/memory.max": 8 * GIB,
        "sys/fs/cgroup/job/memory.current": 6 * GIB,
        "sys/fs/cgroup/job/memory.stat": f"anon {GIB}\ninactive_file {5 * GIB}\nodd",
    }
    assert tree(tmp_path, files).memory_room_bytes == 7 * GIB
