"""The kernels are machine code for GPUs from A100 to RTX 5090; they do not spill, and wait in time.

And a step launches few of them.
"""

import json
import os
import subprocess
import sys

import pytest

from runs.gpu_estimates import MOST_LAUNCHES
from tests.backends.triton.interpreter import triton
from tests.backends.triton.ptx import accesses

SHARED = {"80": 163, "90": 227, "100": 227, "120": 99}  # KiB that a program may have, by capability
EARLY = "90", "100", "120"
KERNELS = {"read_lane", "project_heads", "attend_part", "project", "add_normed", "draw_token"}
ALONE = "draw_token"  # starts when the one before has ended
STACK = 16  # bytes, with which ptxas makes room for one program more; spills are hundreds

assert triton


def compiling(*arguments: str) -> list[dict]:
    """Run in a process of its own, for here the interpreter may have taken the kernels."""
    settings = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.backends.triton.compiling", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=settings)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("capability", SHARED)
def test_kernels_compile_without_spills_and_read_only_weights_before_they_wait(capability):
    rows = compiling(capability)
    assert {row["kernel"] for row in rows} == KERNELS
    for row in rows:
        assert row["spilled_bytes"] <= STACK, row
        assert row["shared_bytes"] <= SHARED[capability] << 10, row
        assert row["registers"] <= 255, row
        is_early = capability in EARLY and row["kernel"] != ALONE
        assert ("before" in row) == is_early, row
        if is_early:
            weighs = row["kernel"].startswith("project")
            assert set(row["before"]) == ({"ld weights"} if weighs else set()), row
            assert any(name.startswith("st ") for name in row["after"]), row
            assert ("ld x" in row["after"]) == (weighs or row["kernel"] == "add_normed"), row


def test_a_step_takes_few_launches():
    """Ours, and those of PyTorch: five a layer, and four."""
    rows = compiling("launches")
    assert {row["preset"] for row in rows} == set(MOST_LAUNCHES)
    for row in rows:
        launches = row["launches"]
        assert sum(launches.values()) <= MOST_LAUNCHES[row["preset"]], row
        assert {name for name in launches if name.startswith("torch.")} == {"torch.scatter_"}


HEAD = """
.visible .entry kernel(
ld.param.b64 %rd1, [kernel_param_0];
ld.param.b64 %rd2, [kernel_param_1];
add.s64 %rd3, %rd1, 8;
@%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd3 + 0 ];
"""
TAIL = """
griddepcontrol.wait ;
$L1:
mad.wide.s32 %rd4, %r1, 2, %rd2;
cp.async.cg.shared.global [ %r5 + 0 ], [ %rd4 + 0 ], 0x10, %r6;
st.global.b32 [ %rd4 + 4 ], { %r1 };
"""
SIGNATURE = {"weights": "*bf16", "SIZE": "constexpr", "x": "*bf16", "strides": ("i32", "constexpr")}


def test_accesses_are_told_by_argument_and_by_the_wait():
    found = accesses(HEAD + TAIL, SIGNATURE)
    assert found == {"before": {"ld weights": 1}, "after": {"ld x": 1, "st x": 1}}


@pytest.mark.parametrize(
    ("ptx", "message"),
    [
        (HEAD, "0 waits"),
        (HEAD + "@%p1 bra $L1;" + TAIL, "the wait may be jumped over"),
        (HEAD + "ld.global.b32 { %r1 }, [ %rd9 + 0 ];" + TAIL, "an address of nowhere"),
    ],
)
def test_what_proves_nothing_is_refused(ptx, message):
    with pytest.raises(ValueError, match=message):
        accesses(ptx, SIGNATURE)
