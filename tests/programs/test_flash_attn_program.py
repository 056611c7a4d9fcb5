"""A program for flash-attn runs as it is, where the module of that name is ours."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from types import ModuleType

import ascend_attn_ops.flash_attn
import plain
import pytest
import torch
from torch import Tensor, nn


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.delitem(sys.modules, "flash_attn_program", raising=False)
    ascend_attn_ops.flash_attn.enable()
    import flash_attn_program

    yield flash_attn_program
    ascend_attn_ops.flash_attn.disable()


@pytest.fixture
def models(program: ModuleType) -> tuple[nn.Module, nn.Module]:
    model = program.MHA().bfloat16()
    return model, copy.deepcopy(model).double()


def by_definition(judge: nn.Module, x: Tensor, ends: list[int] | None = None) -> Tensor:
    x = x.double()
    q, k, v = judge.project(x)
    out = plain.packed_attention(q, k, v, ends) if ends else plain.attention(q, k, v)
    return judge.out(out.flatten(-2))


def hidden(*shape: int) -> Tensor:
    return torch.randn(*shape, 96, dtype=torch.bfloat16)


@pytest.mark.parametrize("packs", [[None], [[7, 30, 31, 64], [40, 64]]], ids=["dense", "packed"])
@pytest.mark.parametrize("compiled", [False, True])
def test_training(
    models: tuple[nn.Module, nn.Module], compiled: bool, packs: list[list[int] | None]
) -> None:
    model, judge = models
    run = torch.compile(model, fullgraph=True) if compiled else model
    for ends in packs:
        x, lengths = hidden(2, 40), ()
        if ends:
            x, cu_seqlens = hidden(ends[-1]), torch.tensor([0, *ends], dtype=torch.int32)
            lengths = cu_seqlens, int(cu_seqlens.diff().max())
        out = run(x, *lengths)
        expected = by_definition(judge, x, ends)
        plain.assert_close(out, expected, torch.bfloat16, "out")
        out.float().square().mean().backward()
        expected.square().mean().backward()
    plain.assert_same_gradients(model, judge, torch.bfloat16)


def test_padded_training(models: tuple[nn.Module, nn.Module]) -> None:
    model, judge = models
    x, mask = hidden(2, 40), torch.arange(40) < torch.tensor([[40], [17]])
    out = model.padded(x, mask)
    assert not out[~mask].any()
    plain.assert_close(out[mask], by_definition(judge, x[mask], [40, 57]), torch.bfloat16, "out")
    out.float().square().sum().backward()
    by_definition(judge, x[mask], [40, 57]).square().sum().backward()
    plain.assert_same_gradients(model, judge, torch.bfloat16)


@torch.no_grad()
@pytest.mark.parametrize("compiled", [False, True])
def test_decoding(program: ModuleType, models: tuple[nn.Module, nn.Module], compiled: bool) -> None:
    """Two sequences of other lengths, whose prompts are written one by one. Steps are compiled once
    for all lengths."""
    model, judge = models
    decode = torch.compile(model.decode, fullgraph=True) if compiled else model.decode
    key_cache, value_cache = program.new_cache(2, 64)
    texts = [hidden(9), hidden(30)]
    for i, text in enumerate(texts):
        cache = key_cache[i : i + 1], value_cache[i : i + 1]
        out = model.decode(text[None], cache, torch.zeros(1, dtype=torch.int32))
        plain.assert_close(out, by_definition(judge, text[None]), torch.bfloat16, "prompt")
    lengths = torch.tensor([len(text) for text in texts], dtype=torch.int32)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(3):
            x = hidden(2, 1)
            out = decode(x, (key_cache, value_cache), lengths)
            lengths += 1
            texts = [torch.cat((text, new)) for text, new in zip(texts, x, strict=True)]
            expected = torch.stack([by_definition(judge, text[None])[0, -1:] for text in texts])
            plain.assert_close(out, expected, torch.bfloat16, "out")
