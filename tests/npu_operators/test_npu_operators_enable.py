"""How torch_npu's names come to be: the stand-in, fake tensors, graphs."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from support import fresh
from support.npu_names import torch_npu
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

without_torch_npu = pytest.mark.skipif(
    importlib.util.find_spec("torch_npu") is not None, reason="torch_npu is installed"
)


def run(code: str) -> str:
    """Returns what `code` prints in a process of its own."""
    status, out, err = fresh.run(code)
    assert status == 0, err
    return out


@without_torch_npu
def test_the_stand_in() -> None:
    code = """
        import importlib.util
        import torch
        import ascend_attn_ops.torch_npu as npu_operators

        try:
            npu_operators.enable()
        except ImportError as error:
            print(error)
        npu_operators.enable(stand_in=True)
        import torch_npu

        first = torch_npu.npu_swiglu
        npu_operators.enable()
        assert torch_npu.npu_swiglu is first is torch.ops.npu.npu_swiglu
        print(torch_npu.__version__, importlib.util.find_spec("torch_npu").name)
        try:
            torch_npu.npu_mrope
        except AttributeError as error:
            print(error)
        try:
            from torch_npu import npu_mrope
        except ImportError as error:
            print(error)
    """
    missing, version, attribute, imported = run(code).splitlines()
    release = ".".join(torch.__version__.split(".")[:2])
    assert f"pip install --no-deps 'torch_npu=={release}.*'" in missing
    assert "enable(stand_in=True)" in missing
    assert version == "2.13.0+stand-in torch_npu"
    assert "no attribute 'npu_mrope': it is a stand-in" in attribute
    assert "npu_fusion_attention_v3" in attribute
    assert "cannot import name 'npu_mrope'" in imported


@without_torch_npu
def test_disable_undoes_enable() -> None:
    code = """
        import importlib.util
        import sys
        import torch
        import ascend_attn_ops.torch_npu as npu_operators
        from unittest import mock

        x = torch.randn(3, 8)
        for _ in range(2):
            # All or nothing is enabled.
            register = mock.Mock(wraps=npu_operators.register, side_effect=[None] * 4 + [KeyError])
            with mock.patch.object(npu_operators, "register", register):
                try:
                    npu_operators.enable(stand_in=True)
                except KeyError:
                    print("torch_npu" in sys.modules, hasattr(torch.ops.npu, "npu_swiglu"))
            npu_operators.enable(stand_in=True)
            npu_operators.enable(stand_in=True)
            import torch_npu
            print(torch_npu.npu_swiglu(x).shape == torch.ops.npu.npu_swiglu(x).shape)
            for _ in range(2):
                npu_operators.disable()
            print(hasattr(torch_npu, "npu_swiglu"), hasattr(torch.ops.npu, "npu_swiglu"))
            print("torch_npu" in sys.modules, importlib.util.find_spec("torch_npu"))
    """
    assert run(code).splitlines() == ["False False", "True", "False False", "False None"] * 2


def bf16(*shape: int, device: str = "cpu") -> Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, device=device)


def calls(device: str = "cpu") -> dict[str, Any]:
    """A call of operators of each kind, whose outputs are tensors."""
    query, key = bf16(2, 5, 4, 64, device=device), bf16(2, 7, 2, 64, device=device)
    packed = bf16(9, 4, 64, device=device)
    ends = torch.tensor([4, 9], device=device)
    square = torch.ones(2048, 2048, dtype=torch.bool, device=device).triu(1)
    cache = bf16(8, 16, 128, device=device)
    latent, rope = bf16(1, 3, 1, 512, device=device), bf16(1, 3, 1, 64, device=device)
    indices = torch.zeros(1, 3, 1, 2048, dtype=torch.int32, device=device)
    table = torch.zeros(2, 2, dtype=torch.int32, device=device)
    heads = {"num_heads": 4, "num_key_value_heads": 2, "input_layout": "BSND"}
    lengths = [20, 7]
    return {
        "npu_fusion_attention": lambda x: torch_npu.npu_fusion_attention(
            query * x, key, key, 4, "BSND", atten_mask=square, sparse_mode=3, keep_prob=0.5
        )[:4],
        "npu_fusion_attention_v3": lambda x: torch_npu.npu_fusion_attention_v3(
            packed * x, packed, packed, 4, "TND", actual_seq_qlen=ends, actual_seq_kvlen=ends,
            keep_prob=0.5, sink=torch.ones(4, device=device),
        ),
        "npu_fused_infer_attention_score": lambda x: torch_npu.npu_fused_infer_attention_score(
            query * x, cache, cache, block_table=table, block_size=16,
            actual_seq_lengths_kv=lengths, softmax_lse_flag=True, **heads,
        ),
        "npu_prompt_flash_attention": lambda x: (
            torch_npu.npu_prompt_flash_attention(query * x, key, key, **heads),
        ),
        "npu_sparse_flash_attention": lambda x: torch_npu.npu_sparse_flash_attention(
            latent.expand(1, 3, 16, 512) * x, latent, latent, indices, 0.1,
            query_rope=rope.expand(1, 3, 16, 64), key_rope=rope, attention_mode=2,
            return_softmax_lse=True,
        ),
        "npu_rms_norm": lambda x: torch_npu.npu_rms_norm(query * x, query[0, 0, 0]),
    }  # fmt: skip


# Operators that torch_npu differentiates.
DIFFERENTIABLE = (
    "npu_fusion_attention", "npu_fusion_attention_v3", "npu_sparse_flash_attention", "npu_rms_norm",
)  # fmt: skip


def shapes(outputs: tuple[Tensor, ...]) -> list[tuple[Any, ...]]:
    return [(x.shape, x.dtype) for x in outputs]


@pytest.mark.parametrize("name", list(calls()))
def test_shapes_without_values(name: str) -> None:
    expected = shapes(calls()[name](torch.ones(())))
    assert shapes(calls("meta")[name](torch.ones((), device="meta"))) == expected
    for mode in (torch.no_grad, torch.inference_mode):
        with FakeTensorMode(), mode():
            outputs = calls()[name](torch.ones(()))
            assert shapes(outputs) == expected
            assert all(x.device.type == "cpu" for x in outputs)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_gradients_without_values(name: str, device: str) -> None:
    with FakeTensorMode() if device == "cpu" else torch.enable_grad():
        x = torch.ones((), device=device, requires_grad=True)
        calls(device)[name](x)[0].float().sum().backward()
        assert x.grad is not None
        assert x.grad.shape == ()


@pytest.mark.parametrize("name", list(calls()))
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled(name: str, backend: str) -> None:
    torch._dynamo.reset()
    call = calls()[name]
    compiled = torch.compile(call, backend=backend)
    results = []
    for function in (call, compiled):
        torch.manual_seed(0)
        x = torch.ones((), requires_grad=name in DIFFERENTIABLE)
        outputs = function(x)
        if x.requires_grad:
            outputs[0].float().sum().backward()
            outputs = (*outputs, x.grad)
        results.append(outputs)
    for actual, expected in zip(*results, strict=True):
        assert torch.equal(actual, expected)


def test_a_cache_in_a_graph() -> None:
    key, cache = bf16(3, 2, 64), torch.zeros(4, 16, 2, 64, dtype=torch.bfloat16)
    slots = torch.tensor([17, -1, 2], dtype=torch.int32)

    def write(cache: Tensor) -> Tensor:
        other = cache.clone()
        torch_npu.npu_scatter_pa_kv_cache(key, key, cache, other, slots, cache_mode="Norm")
        return other

    expected, actual = cache.clone(), cache.clone()
    other = write(expected)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(write, backend="aot_eager")(actual), other)
    assert torch.equal(actual, expected)


def test_autocast_changes_nothing() -> None:
    """The device has no rule for these operators, and refuses what does not fit together."""
    query, key = bf16(1, 5, 4, 64), bf16(1, 5, 4, 64).float()
    with torch.autocast("cpu", torch.bfloat16):
        out = torch_npu.npu_fusion_attention(key, key, key, 4, "BSND")[0]
        assert out.dtype == torch.float32
        with pytest.raises(TypeError, match="key: expected"):
            torch_npu.npu_fusion_attention(query, key, key, 4, "BSND")


def test_operators_without_gradient_say_so() -> None:
    """As torch does for torch_npu's."""
    query = bf16(1, 5, 4, 64).requires_grad_()
    out = torch_npu.npu_prompt_flash_attention(
        query, query, query, num_heads=4, input_layout="BSND"
    )
    with pytest.warns(UserWarning, match="autograd kernel was not registered"):
        out.sum().backward()
    assert query.grad is None
