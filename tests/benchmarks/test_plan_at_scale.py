"""What `benchmarks/plan_at_scale.py` counts."""

from benchmarks import plan_at_scale

TRACE = """\
11 openat(AT_FDCWD, "/lib/torch/a.py", O_RDONLY|O_CLOEXEC) = 3
11 openat(AT_FDCWD, "/lib/b.py", O_RDONLY|O_CLOEXEC) = -1 ENOENT (No such file or directory)
11 newfstatat(AT_FDCWD, "/lib/c", {st_mode=S_IFREG|0644, st_size=7, ...}, 0) = 0
12 openat(AT_FDCWD, "/lib/d.py", O_RDONLY|O_CLOEXEC <unfinished ...>
11 readlink("/proc/self/exe", "/usr/bin/python", 4095) = 15
12 <... openat resumed>) = -1 ENOENT (No such file or directory)
12 <... futex resumed>) = 0
11 openat(AT_FDCWD, "/lib/e.py", O_RDONLY <unfinished ...>
11 <... openat resumed>) = 4
11 +++ exited with 0 +++
"""


def test_a_file_that_is_not_there_was_asked_for_and_not_opened() -> None:
    assert list(plan_at_scale.traced_calls(TRACE.splitlines())) == [
        ("openat", "/lib/torch/a.py", True),
        ("openat", "/lib/b.py", False),
        ("newfstatat", "/lib/c", True),
        ("readlink", "/proc/self/exe", True),
        ("openat", "/lib/d.py", False),
        ("openat", "/lib/e.py", True),
    ]


def test_each_gpu_and_each_host_has_its_rows_of_telemetry() -> None:
    """At 10 s each has all that is read, at 0.5 s one of ten."""
    (few, many) = plan_at_scale.watching([8, 64])
    assert (few["rows_at_0.5_s"], few["rows_at_10_s"]) == (9 * 7200, 9 * 360)
    assert (many["rows_at_0.5_s"], many["rows_at_10_s"]) == (72 * 7200, 72 * 360)
    for row in (few, many):
        of_a_row = {name: row[f"at_{name}_gib"] / row[f"rows_at_{name}"] for name in ("0.5_s", "10_s")}
        assert of_a_row["10_s"] > 1.3 * of_a_row["0.5_s"]
    assert many["at_10_s_gib"] / 72 > few["at_10_s_gib"] / 9  # the numbers of other nodes are longer
