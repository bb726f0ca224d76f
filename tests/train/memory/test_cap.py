"""Host memory held to a budget, in a process of its own: a limit can't be taken back."""

import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_DATA counts mappings on Linux")


def run(script):
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout.strip(), done.stderr


def test_what_goes_beyond_the_budget_fails_as_out_of_memory_and_the_rest_goes_on():
    code, out, err = run(
        """
        import torch
        from wellfed.train.memory import cap, oom
        assert cap.cap_host(512 * 2**20) is not None
        within = torch.ones(256 * 2**20, dtype=torch.uint8)
        try:
            torch.ones(400 * 2**20, dtype=torch.uint8)
        except Exception as error:
            print(oom.classify(error).kind)
        print(int(within[-1]))
        """
    )
    assert (code, out.split()) == (0, ["host_oom", "1"]), err


@pytest.mark.slow
def test_a_lower_limit_that_is_there_stays():
    code, out, err = run(
        """
        import psutil, resource, torch
        from wellfed.train.memory import cap
        resource.setrlimit(resource.RLIMIT_DATA, (psutil.Process().memory_info().data + 2**30, resource.RLIM_INFINITY))
        before = resource.getrlimit(resource.RLIMIT_DATA)
        print(cap.cap_host(4 * 2**30), resource.getrlimit(resource.RLIMIT_DATA) == before)
        """
    )
    assert (code, out) == (0, "None True"), err
