"""torch_npu's own operators give on the CPU what they give on the NPU.

The simulated device computes with this library's CPU kernels: equal bits mean that torch_npu tells
aclnn what the kernel for the CPU tells the operator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_npu
from ascend_attn_ops.npu_operators import enable
from ascend_attn_ops.npu_operators.schemas import RELEASE, SCHEMAS
from support.tolerance import assert_same_bits
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

OPERATORS = list(SCHEMAS)
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
    operators = getattr(torch.ops, namespace)
    same_release = torch_npu.__version__ == RELEASE
    if not hasattr(operators, operator):
        assert not same_release
        assert name in NEWER_OPERATORS
        return
    ours = torch._C.parse_schema(name + SCHEMAS[name])
    theirs = getattr(operators, operator).default._schema
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


def bf16(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16)


def wants(*shape: int) -> Tensor:
    return bf16(*shape).requires_grad_()


SQUARE = torch.ones(2048, 2048, dtype=torch.bool).triu(1)


def fusion(layout: str, **options: Any) -> dict[str, Any]:
    shapes = {
        "BSND": ((2, 5, 4, 64), (2, 7, 2, 64)), "SBH": ((5, 2, 256), (7, 2, 128)),
        "TND": ((10, 4, 64), (14, 2, 64)),
    }[layout]  # fmt: skip
    query, key, value = (wants(*shape) for shape in (shapes[0], shapes[1], shapes[1]))
    return {
        "query": query, "key": key, "value": value, "head_num": 4, "input_layout": layout,
        "scale": 0.125, **options,
    }  # fmt: skip


def sparse() -> dict[str, Any]:
    latent = wants(1, 6, 1, 512)
    return {
        "query": wants(1, 6, 32, 512), "key": latent, "value": latent,
        "sparse_indices": torch.arange(2048, dtype=torch.int32).clamp(max=5).expand(1, 6, 1, -1),
        "scale_value": 0.1, "query_rope": wants(1, 6, 32, 64), "key_rope": wants(1, 6, 1, 64),
        "attention_mode": 2, "return_softmax_lse": True, "sparse_mode": 0,
    }  # fmt: skip


def indexer(**options: Any) -> dict[str, Any]:
    return {
        "query": wants(1, 6, 8, 128), "key": wants(1, 6, 1, 128), "weights": wants(1, 6, 8),
        **options,
    }  # fmt: skip


def loss() -> dict[str, Any]:
    call = tree_map_only(Tensor, Tensor.detach, sparse())
    indices = torch.full((1, 6, 1, 2048), -1, dtype=torch.int32)
    indices[..., :6] = torch.arange(6, dtype=torch.int32).where(
        torch.ones(6, 6, dtype=torch.bool).tril(), -1
    )[None, :, None]
    return {
        **{x: call[x] for x in ("query", "key", "query_rope", "key_rope", "scale_value")},
        "query_index": bf16(1, 6, 8, 128), "key_index": bf16(1, 6, 1, 128),
        "weights": bf16(1, 6, 8), "sparse_indices": indices,
        "softmax_max": torch.full((1, 1, 6, 32), 3.0), "softmax_sum": torch.ones(1, 1, 6, 32),
    }  # fmt: skip


def inference(**options: Any) -> dict[str, Any]:
    key = bf16(2, 7, 2, 64)
    return {
        "query": bf16(2, 5, 4, 64), "key": key, "value": key, "num_heads": 4,
        "num_key_value_heads": 2, "input_layout": "BSND", "scale_value": 0.125, **options,
    }  # fmt: skip


TND = {"actual_seq_qlen": [3, 5, 10], "actual_seq_kvlen": [7, 8, 14]}
TND_OF_V3 = {name: torch.tensor(ends) for name, ends in TND.items()}
BY_TOKEN = {"softmax_layout": "TND"}


def packed_gradient(version: str, lengths: dict[str, Any], sink: Tensor | None) -> dict[str, Any]:
    """A call of the gradient's operator with statistics in the order of tokens."""
    call = tree_map_only(Tensor, Tensor.detach, fusion("TND", sink=sink, **BY_TOKEN, **lengths))
    out, maximum, total, *_ = getattr(torch_npu, f"npu_fusion_attention{version}")(**call)
    scale = call.pop("scale")
    return {
        **call, "scale_value": scale, "dy": bf16(*out.shape), "attention_in": out,
        "softmax_max": maximum, "softmax_sum": total,
    }  # fmt: skip


CALLS: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
    "every key": ("npu_fusion_attention_v2", lambda: fusion("BSND")),
    "causal": (
        "npu_fusion_attention_v2", lambda: fusion("SBH", atten_mask=SQUARE, sparse_mode=3)
    ),
    "band": (
        "npu_fusion_attention_v2",
        lambda: fusion("BSND", atten_mask=SQUARE, sparse_mode=4, pre_tokens=4, next_tokens=1),
    ),
    "packed": (
        "npu_fusion_attention_v2", lambda: fusion("TND", atten_mask=SQUARE, sparse_mode=3, **TND)
    ),
    "statistics by token": ("npu_fusion_attention", lambda: fusion("TND", **TND, **BY_TOKEN)),
    "statistics by token with sinks": (
        "npu_fusion_attention_v2",
        lambda: fusion("TND", sink=torch.randn(4, requires_grad=True), **TND, **BY_TOKEN),
    ),
    "statistics by token, _v3": (
        "npu_fusion_attention_v3", lambda: fusion("TND", **TND_OF_V3, **BY_TOKEN)
    ),
    "statistics by token with sinks, _v3": (
        "npu_fusion_attention_v3",
        lambda: fusion("TND", sink=torch.randn(4, requires_grad=True), **TND_OF_V3, **BY_TOKEN),
    ),
    "gradient by token": (
        "npu_fusion_attention_grad", lambda: packed_gradient("", TND, None)
    ),
    "gradient by token, _v2": (
        "npu_fusion_attention_grad_v2", lambda: packed_gradient("_v2", TND, torch.randn(4))
    ),
    "gradient by token, _v3": (
        "npu_fusion_attention_grad_v3", lambda: packed_gradient("_v3", TND_OF_V3, torch.randn(4))
    ),
    "bias": ("npu_fusion_attention_v2", lambda: fusion("BSND", pse=bf16(2, 4, 5, 7), pse_type=0)),
    "mask of dropout": (
        "npu_fusion_attention_v2",
        lambda: {
            **tree_map_only(Tensor, Tensor.detach, fusion("BSND")), "keep_prob": 0.5,
            "dropout_mask": torch.full((48,), 0b10100101, dtype=torch.uint8),
        },
    ),
    "prompt": ("npu_prompt_flash_attention", inference),
    "prompt with lengths": (
        "npu_prompt_flash_attention",
        lambda: inference(
            actual_seq_lengths=[5, 3], actual_seq_lengths_kv=[7, 4],
            atten_mask=torch.eye(5, 7, dtype=torch.bool), sparse_mode=1,
        ),
    ),
    "sparse attention": ("npu_sparse_flash_attention", sparse),
    "indexer": ("npu_lightning_indexer", lambda: indexer(sparse_count=4, return_value=True)),
    "loss of the indexer": ("npu_sparse_lightning_indexer_grad_kl_loss", loss),
}  # fmt: skip


def results(name: str, call: dict[str, Any], device: str) -> tuple[Tensor, ...]:
    """The outputs that are tensors, but the empty ones and seeds in int64, and the gradients."""
    on_device = tree_map_only(
        Tensor, lambda x: x.detach().to(device).requires_grad_(x.requires_grad), call
    )
    on_device |= {x: call[x] for x in TND if x in call}  # _v3 takes tensors on the host
    if call.get("value") is call["key"]:
        on_device["value"] = on_device["key"]
    outputs = getattr(torch_npu, name)(**on_device)
    tensors = [x for x in tree_leaves(outputs) if isinstance(x, Tensor)]
    found = [x for x in tensors if x.numel() and x.dtype != torch.int64]
    assert all(x.device.type == device for x in found)
    inputs = [x for x in on_device.values() if isinstance(x, Tensor) and x.requires_grad]
    if inputs:
        # The last floating output: the values of an indexer, or the first of an attention.
        differentiable = found[1] if name == "npu_lightning_indexer" else found[0]
        weight = torch.linspace(-1, 1, differentiable.numel()).view(differentiable.shape)
        weight = weight.to(differentiable.dtype).to(device)
        distinct = list({id(x): x for x in inputs}.values())
        found += torch.autograd.grad(differentiable, distinct, weight)
    return tuple(x.detach().cpu() for x in found)


@pytest.mark.parametrize("case", list(CALLS))
def test_the_cpu_equals_the_npu(case: str) -> None:
    torch.manual_seed(0)
    name, make = CALLS[case]
    call = make()
    assert_same_bits(results(name, call, "npu"), results(name, call, "cpu"))


@pytest.mark.parametrize("mode", ["Norm", "PA_NZ"])
def test_caches(mode: str) -> None:
    key, value = bf16(2, 3, 2, 64).unbind()
    shape = (4, 16, 2, 64) if mode == "Norm" else (4, 8, 16, 16)
    slots = torch.tensor([17, 40, 2], dtype=torch.int32)
    caches = []
    for device in ("npu", "cpu"):
        pair = [torch.zeros(shape, dtype=torch.bfloat16).to(device) for _ in range(2)]
        torch_npu.npu_scatter_pa_kv_cache(
            key.to(device), value.to(device), *pair, slots.to(device), cache_mode=mode
        )
        caches.append(tuple(x.cpu() for x in pair))
    assert_same_bits(caches[0], caches[1])
    assert caches[1][0].any()


@pytest.mark.parametrize("update_type", [0, 1])
def test_updates(update_type: int) -> None:
    lse, outs = torch.randn(2, 8), torch.randn(2, 8, 64)
    on_npu, on_cpu = (
        torch_npu.npu_attention_update(
            [x.to(device) for x in lse], [x.to(device) for x in outs], update_type
        )
        for device in ("npu", "cpu")
    )
    assert_same_bits((on_npu[0].cpu(),), (on_cpu[0],))
    if update_type:
        assert_same_bits((on_npu[1].cpu(),), (on_cpu[1],))
    else:
        assert on_npu[1] is on_cpu[1] is None


def test_reshape_and_cache() -> None:
    """An operator of ATB, from vLLM's cache: slots below 0 are skipped."""
    key, value = bf16(3, 2, 64), bf16(3, 2, 64)
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
