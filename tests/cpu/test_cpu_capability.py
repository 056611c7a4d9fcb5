"""The CPU kernels with less than this processor has: ASCEND_ATTN_OPS_CPU_CAPABILITY."""

from __future__ import annotations

import itertools
import os
import platform
import subprocess
import sys

import ascend_attn_ops
import pytest
import torch
from ascend_attn_ops import _C, reference
from support.checkout import ROOT
from support.samples import OPERATORS, Sample
from torch import Tensor

VARIABLE = "ASCEND_ATTN_OPS_CPU_CAPABILITY"
# A capability above that of the processor is its own.
CAPABILITIES = {"x86_64": ["baseline", "avx2", "avx512"]}.get(platform.machine(), ["baseline"])
# Heads, size and selected keys: around the sizes of the blocks in which products are computed.
SIZES = [(1, 1, 1), (3, 5, 2), (7, 17, 33), (8, 16, 7), (9, 31, 127), (17, 33, 9), (35, 130, 64)]
DTYPES = [torch.bfloat16, torch.float32, torch.float64]


def run(*command: str, capability: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), VARIABLE: capability},
        capture_output=True,
        text=True,
        timeout=300,
    )


def small_integers(*sizes: int, dtype: torch.dtype) -> Tensor:
    return torch.randint(-3, 4, sizes).to(dtype)


def assert_products_of_odd_sizes() -> None:
    with ascend_attn_ops.limits(None):
        for dtype, sizes in itertools.product(DTYPES, SIZES):
            assert_products(dtype, *sizes)


def assert_products(dtype: torch.dtype, heads: int, size: int, keys: int) -> None:
    """Products with the keys, with the values, and those of the gradient."""
    torch.manual_seed(0)
    tokens = 2
    query = small_integers(1, tokens, heads, size, dtype=dtype)
    key = small_integers(1, keys + 3, 1, size, dtype=dtype)
    value = small_integers(1, keys + 3, 1, size, dtype=dtype)
    d_out = small_integers(1, tokens, heads, size, dtype=dtype)
    indices = torch.stack([torch.randperm(keys + 3)[:keys] for _ in range(tokens)])
    inputs = {
        "query": query,
        "key": key,
        "value": value,
        "sparse_indices": indices.to(torch.int32).view(1, tokens, 1, keys),
    }
    where = f"{heads} heads of {size}, {keys} keys, {dtype}"
    options = {"scale_value": 0.25 * size**-0.5, "sparse_mode": 0}
    forward = Sample("sparse_flash_attention", where, inputs, options)
    out, softmax_max, softmax_sum = forward.call(reference)
    gradient = forward.of_gradient(
        d_out=d_out, out=out, softmax_max=softmax_max, softmax_sum=softmax_sum
    )
    for sample in (forward, gradient):
        operator = OPERATORS[sample.operator]
        operator.assert_matches_reference(sample, sample.call(torch.ops.ascend))


def test_products_with_mkldnn_switched_off() -> None:
    """torch then refuses the products that it has for this processor."""
    with torch.backends.mkldnn.flags(enabled=False):
        assert_products_of_odd_sizes()
    assert_products_of_odd_sizes()


@pytest.mark.parametrize("capability", [*CAPABILITIES, "native"])
def test_products_of_odd_sizes(capability: str) -> None:
    program = "import test_cpu_capability as tests; tests.assert_products_of_odd_sizes()"
    result = run("-c", program, capability=capability)
    assert result.returncode == 0, result.stderr


def assert_pass(tests: str, sample: int, capability: str) -> None:
    """A sample of the tests in this process's environment, but for the capability."""
    command = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--sample", str(sample))
    result = run(*command, f"{ROOT}/tests/operators/{tests}", capability=capability)
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_operator_at_the_baseline() -> None:
    assert_pass("test_numerics.py::test_matches_the_reference", 40, "baseline")


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_backward_has_the_weights_of_the_forward(capability: str) -> None:
    assert_pass("test_probabilities.py", 5, capability)


def implementations(capability: str) -> list[str]:
    program = "from ascend_attn_ops import _C; print(*_C.cpu_implementations().values(), sep='\\n')"
    return run("-c", program, capability=capability).stdout.splitlines()


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_what_is_held_back(capability: str) -> None:
    loops, bfloat16, float32, int8 = implementations(capability)
    assert loops.endswith(f" ({VARIABLE}={capability})")
    assert (bfloat16, float32, int8) == ("as float32", "vector blocks", "as float32")


def test_native_holds_nothing_back() -> None:
    if os.environ.get(VARIABLE, "native") != "native":
        pytest.skip(f"{VARIABLE} is set")
    assert implementations("native") == [*_C.cpu_implementations().values()]


@pytest.mark.skipif(platform.machine() == "x86_64", reason="torch has products for x86-64")
def test_products_are_not_those_of_a_blas_with_threads() -> None:
    assert _C.cpu_implementations()["float32 products"] == "vector blocks"


def test_an_unknown_capability() -> None:
    last = run("-c", "import ascend_attn_ops", capability="sse9").stderr.splitlines()[-1]
    known = " or ".join([*CAPABILITIES, "native"])
    assert last == f"ValueError: {VARIABLE}=sse9: expected {known}"
