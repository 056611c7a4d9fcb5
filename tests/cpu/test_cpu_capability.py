"""The CPU kernels with less than this processor has: ASCEND_ATTN_OPS_CPU_CAPABILITY."""

from __future__ import annotations

import itertools
import json
import os
import platform
from functools import cache

import ascend_attn_ops
import pytest
import torch
from ascend_attn_ops import _C, reference
from support import fresh
from support.checkout import ROOT
from support.samples import OPERATORS, Sample
from support.turns import nightly
from torch import Tensor

VARIABLE = "ASCEND_ATTN_OPS_CPU_CAPABILITY"
CAPABILITIES = {"x86_64": ["baseline", "avx2", "avx512"]}.get(platform.machine(), ["baseline"])
# Heads, size and selected keys: around the sizes of the blocks in which products are computed.
SIZES = [(1, 1, 1), (3, 5, 2), (7, 17, 33), (8, 16, 7), (9, 31, 127), (17, 33, 9), (35, 130, 64)]
# The products that may be chosen where nothing else is held back.
PRODUCTS = [f"native:{products}" for products in ("bfloat16", "float32", "portable")]
DTYPES = [torch.bfloat16, torch.float32, torch.float64]


RARE = ("avx512", "native:float32")
EACH = [pytest.param(x, marks=nightly if x in RARE else ()) for x in [*CAPABILITIES, *PRODUCTS]]


def run(*arguments: str, capability: str, **environment: str) -> fresh.Ended:
    return fresh.python(*arguments, seconds=300, **{VARIABLE: capability}, **environment)


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
        "query": query, "key": key, "value": value,
        "sparse_indices": indices.to(torch.int32).view(1, tokens, 1, keys),
    }  # fmt: skip
    where = f"{heads} heads of {size}, {keys} keys, {dtype}"
    options = {"scale_value": 0.25 * size**-0.5, "sparse_mode": 0}
    forward = Sample("sparse_flash_attention", where, inputs, options)
    out, softmax_max, softmax_sum = forward.call(reference)
    gradient = forward.of_gradient(
        d_out=d_out, out=out, softmax_max=softmax_max, softmax_sum=softmax_sum
    )
    for sample in (forward, gradient):
        operator = OPERATORS[sample.operator]
        operator.bounds.check(sample, sample.call(torch.ops.ascend))


def test_products_with_mkldnn_switched_off() -> None:
    """torch then refuses the products that it has for this processor."""
    with torch.backends.mkldnn.flags(enabled=False):
        assert_products_of_odd_sizes()
    assert_products_of_odd_sizes()


@cache
def implementations(capability: str, **environment: str) -> dict[str, str]:
    printed = "json.dumps([_C.matrix_products(), _C.cpu_implementations()])"
    program = f"import json; from ascend_attn_ops import _C; print({printed})"
    result = run("-c", program, capability=capability, **environment)
    assert result.status == 0, result.err
    products, rows = json.loads(result.out)
    return {"products": products, **rows}


def skip_unless_built(capability: str) -> None:
    if capability in CAPABILITIES and capability not in _C.vector_units:
        pytest.skip(f"this build has {_C.vector_units[0]} alone: VECTOR_UNITS=all builds all")


def skip_without(capability: str) -> None:
    skip_unless_built(capability)
    rows = implementations(capability)
    unit = {"avx2": "AVX2", "avx512": "AVX512"}.get(capability, "")
    if not rows["vector loops"].startswith(unit):
        pytest.skip(f"no {unit} in this processor or build: {rows['vector loops']}")
    if capability == "native:bfloat16" and rows["bfloat16 products"] == "as float32":
        pytest.skip("no bfloat16 products in this processor or build")


@pytest.mark.parametrize("capability", EACH)
def test_every_operator(capability: str) -> None:
    """With a sample of each operator and dtype, and products of odd sizes."""
    skip_without(capability)
    operators = ROOT / "tests" / "operators"
    tests = (
        f"{operators}/test_numerics.py::test_matches_the_reference",
        f"{operators}/test_probabilities.py", f"{__file__}::test_products_with_mkldnn_switched_off",
    )  # fmt: skip
    options = ("-q", "-p", "no:cacheprovider", "--share=40")
    result = run("-m", "pytest", *options, *tests, capability=capability)
    assert result.status == 0, result.out + result.err


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_what_is_held_back(capability: str) -> None:
    skip_unless_built(capability)
    rows = implementations(capability)
    assert rows["vector loops"].endswith(f" ({VARIABLE}={capability})")
    assert rows["bfloat16 products"] == rows["int8 products"] == "as float32"
    assert rows["float32 products"] == "vector blocks"


@pytest.mark.parametrize("capability", PRODUCTS)
def test_products_are_chosen_by_the_variable(capability: str) -> None:
    native, rows = implementations("native:bfloat16"), implementations(capability)
    assert rows["products"] == capability.removeprefix("native:")
    assert rows["products chosen by"] == VARIABLE
    assert rows["int8 products"] == native["int8 products"]
    if capability != "native:bfloat16":
        assert rows["bfloat16 products"] == "as float32"
    if capability == "native:portable":
        assert rows["float32 products"] == "vector blocks"
    else:
        assert rows["float32 products"] == native["float32 products"]


def test_native_holds_nothing_back() -> None:
    if os.environ.get(VARIABLE, "native") != "native":
        pytest.skip(f"{VARIABLE} is set")
    rows = {"products": _C.matrix_products(), **_C.cpu_implementations()}
    assert implementations("native") == rows


@pytest.mark.skipif(platform.machine() == "x86_64", reason="torch has products for x86-64")
def test_products_are_not_those_of_a_blas_with_threads() -> None:
    assert _C.cpu_implementations()["float32 products"] == "vector blocks"


# Smaller ones than the only one built, if there is one.
NOT_BUILT = CAPABILITIES[: CAPABILITIES.index(_C.vector_units[0])]


@pytest.mark.parametrize(
    "capability", ["sse9", "native:", "native:int8", "avx2:float32", *NOT_BUILT]
)
def test_an_unknown_capability(capability: str) -> None:
    last = run("-c", "import ascend_attn_ops", capability=capability).err.splitlines()[-1]
    known = " or ".join([*_C.vector_units, "native", *PRODUCTS])
    assert last == f"ValueError: {VARIABLE}={capability}: expected {known}"
