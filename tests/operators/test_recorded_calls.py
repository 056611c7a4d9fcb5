"""The operators give on the CPU what CANN's own kernels gave."""

from __future__ import annotations

import pytest
from ascend_attn_check.kernel_calls import KernelCall
from support.recorded_calls import FILE, assert_same_as_the_kernel, recorded_calls

pytestmark = [
    pytest.mark.usefixtures("no_limits"),
    pytest.mark.skipif(not FILE.exists(), reason="a source distribution has no recorded calls"),
]


@pytest.mark.parametrize("call", recorded_calls(), ids=lambda call: call.id)
def test_same_as_the_kernel(call: KernelCall) -> None:
    assert_same_as_the_kernel(call, call.run("cpu"))
