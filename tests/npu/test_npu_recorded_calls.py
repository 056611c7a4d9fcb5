"""The NPU path gives, from its launch to its results, what CANN's own kernels gave.

The CPU's results are compared with the kernels' in tests/operators/test_recorded_calls.py.
"""

from __future__ import annotations

import pytest
from ascend_attn_ops.check.kernel_calls import KernelCall
from support.recorded_calls import FILE, recorded_calls
from support.tolerance import assert_same_bits

pytestmark = [
    pytest.mark.usefixtures("no_limits"),
    pytest.mark.skipif(not FILE.exists(), reason="a source distribution has no recorded calls"),
]


@pytest.mark.parametrize("call", recorded_calls(), ids=lambda call: call.id)
def test_same_as_the_kernel(call: KernelCall) -> None:
    expected, actual = call.run("cpu"), call.run("npu")
    assert_same_bits(tuple(actual.values()), tuple(expected.values()))
