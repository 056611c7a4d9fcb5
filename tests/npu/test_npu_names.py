"""torch_npu's own operators, and ours of the same names for the CPU, which stand beside them.

Both compute what plain torch does: simulation/tests/test_torch_npu_operators_* and
tests/npu_operators.
"""

from __future__ import annotations

import pytest
import torch
import torch_npu
from ascend_attn_ops.torch_npu import enable
from ascend_attn_ops.torch_npu.schemas import RELEASE, SCHEMAS
from support.tolerance import assert_same_bits

OPERATORS = [name for name in SCHEMAS if name.startswith(("npu::", "atb::"))]
# An operator and arguments that some supported releases lack.
NEWER_OPERATORS = ("npu::npu_ring_attention_update",)
NEWER_ARGUMENTS = ("sinks",)


def arguments(schema: torch.FunctionSchema) -> list[str]:
    """Describes the arguments that all releases have; `value` has become optional."""
    return [
        f"{str(x.type).replace('Optional[Tensor]', 'Tensor') if x.name == 'value' else x.type} "
        f"{x.name}, by keyword: {x.kwarg_only}, default: {x.default_value}"
        for x in schema.arguments
        if x.name not in NEWER_ARGUMENTS
    ]


def kernels(name: str) -> dict[str, str]:
    """Where the kernel of each dispatch key was registered."""
    lines = torch._C._dispatch_dump(name).splitlines()
    return dict(line.split(": ", 1) for line in lines if ": registered at " in line)


torch.npu.init()  # the simulation puts kernels around those of torch_npu then
OF_TORCH_NPU = {name: kernels(name) for name in OPERATORS}
enable()


@pytest.mark.parametrize("name", OPERATORS)
def test_the_schema_is_that_of_torch_npu(name: str) -> None:
    namespace, _, operator = name.partition("::")
    operator, _, overload = operator.partition(".")
    operators = getattr(torch.ops, namespace)
    same_release = torch_npu.__version__ == RELEASE
    if not hasattr(operators, operator):
        assert not same_release
        assert name in NEWER_OPERATORS
        return
    ours = torch._C.parse_schema(name + SCHEMAS[name])
    theirs = getattr(getattr(operators, operator), overload or "default")._schema
    if same_release:
        assert str(theirs) == str(ours)
    else:
        assert arguments(theirs) == arguments(ours)
        assert [str(x.type) for x in theirs.returns] == [str(x.type) for x in ours.returns]


@pytest.mark.parametrize("name", OPERATORS)
def test_the_kernels_of_torch_npu_stay(name: str) -> None:
    found = kernels(name)
    if not found and name in NEWER_OPERATORS:
        pytest.skip(f"torch_npu {torch_npu.__version__} has no {name}")
    assert OF_TORCH_NPU[name].items() <= found.items()
    assert {"CPU"} <= found.keys() - OF_TORCH_NPU[name] <= {"CPU", "Meta", "AutogradCPU"}
    assert {"PrivateUse1", "Meta"} <= found.keys()


def test_reshape_and_cache() -> None:
    """An operator of ATB, from vLLM's cache: slots below 0 are skipped."""
    key, value = torch.randn(2, 3, 2, 64).bfloat16().unbind()
    caches = [torch.zeros(4, 16, 2, 64, dtype=torch.bfloat16) for _ in range(2)]
    on_npu = [cache.npu() for cache in caches]
    slots = torch.tensor([17, -1, 2], dtype=torch.int32)
    torch_npu._npu_reshape_and_cache(key.npu(), value.npu(), *on_npu, slots.npu())
    torch_npu._npu_reshape_and_cache(key, value, *caches, slots)
    assert_same_bits(tuple(x.cpu() for x in on_npu), tuple(caches))
    for cache, rows in zip(caches, (key, value), strict=True):
        assert torch.equal(cache[1, 1], rows[0])
        assert torch.equal(cache[0, 2], rows[2])
        assert cache.count_nonzero() <= 2 * rows[0].numel()
