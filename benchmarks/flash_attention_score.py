"""flash_attention_score, forward and with its gradients, against torch.

    python benchmarks/flash_attention_score.py

The peers are scaled_dot_product_attention, called as its users would (is_causal if that is the
mask, otherwise the matrix of kept keys), and the formula in plain torch. FLOPs are counted for the
pairs that the mask keeps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import ascend_attn_ops
import torch
from ascend_attn_ops._core.sparse_modes import sparse_mode_mask
from harness import Benchmark, Call, extra_memory, heads_of, name_of
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

ALL_TOKENS = 2147483647
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Shape:
    heads: tuple[int, int] = (16, 16)
    d: int = 128
    tokens: int = 2048
    dtype: torch.dtype = torch.bfloat16
    sparse_mode: int | None = 3
    pre_tokens: int = ALL_TOKENS
    next_tokens: int = ALL_TOKENS

    def __str__(self) -> str:
        mask = {None: "full", 3: "causal"}.get(self.sparse_mode, f"band of {self.pre_tokens}")
        heads, dtype = heads_of(*self.heads), name_of(self.dtype)
        return f"S={self.tokens} N={heads} D={self.d} {dtype} {mask}"

    def kept(self) -> Tensor | None:
        if self.sparse_mode is None:
            return None
        sizes = self.sparse_mode, self.tokens, self.tokens
        return sparse_mode_mask(*sizes, pre_tokens=self.pre_tokens, next_tokens=self.next_tokens)

    def flops(self, products: int) -> int:
        kept = self.kept()
        pairs = self.tokens**2 if kept is None else int(kept.sum())
        return 2 * products * self.heads[0] * self.d * pairs

    def inputs(self, requires_grad: bool) -> list[Tensor]:
        torch.manual_seed(0)
        heads = (self.heads[0], self.heads[1], self.heads[1])
        return [
            torch.randn(1, n, self.tokens, self.d).to(self.dtype).requires_grad_(requires_grad)
            for n in heads
        ]


def ours(shape: Shape) -> Attention:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ascend_attn_ops.flash_attention_score(
            q, k, v, num_heads=shape.heads[0], layout="BNSD", sparse_mode=shape.sparse_mode or 0,
            pre_tokens=shape.pre_tokens, next_tokens=shape.next_tokens,
        )[0]  # fmt: skip

    return attention


def torch_sdpa(shape: Shape) -> Attention:
    gqa = shape.heads[0] != shape.heads[1]
    if shape.sparse_mode == 3:
        return partial(scaled_dot_product_attention, is_causal=True, enable_gqa=gqa)
    return partial(scaled_dot_product_attention, attn_mask=shape.kept(), enable_gqa=gqa)


def formula(shape: Shape) -> Attention:
    kept = shape.kept()
    group = shape.heads[0] // shape.heads[1]

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        scores = q @ k.mT * shape.d**-0.5
        if kept is not None:
            scores = scores.masked_fill(~kept, -torch.inf)
        return scores.softmax(-1) @ v

    return attention


def call_of(make: Callable[[Shape], Attention], shape: Shape, backward: bool) -> Call:
    inputs = shape.inputs(requires_grad=backward)
    attention = make(shape)
    if not backward:
        return lambda: attention(*inputs)
    torch.manual_seed(1)
    d_out = torch.randn(inputs[0].shape).to(shape.dtype)
    return lambda: torch.autograd.grad(attention(*inputs), inputs, d_out)


def warm_call(make: Callable[[Shape], Attention], shape: Shape, backward: bool) -> Call:
    """Return a call of a fresh process that has loaded libraries and generated code."""
    call_of(make, replace(shape, tokens=64), backward)()
    return call_of(make, shape, backward)


SHAPES = [
    Shape(),
    Shape(sparse_mode=None),
    Shape(sparse_mode=4, pre_tokens=256, next_tokens=0),
    Shape(heads=(32, 8), d=64),
    Shape(dtype=torch.float32),
    Shape(dtype=torch.float32, sparse_mode=None),
]


PEERS = {"torch SDPA": torch_sdpa, "torch formula": formula}


def main() -> None:
    run = Benchmark(__file__, __doc__, rounds=5)
    for shape in SHAPES:
        for backward, name, products in ((False, "forward", 2), (True, "forward+backward", 7)):
            run.measure(
                f"{shape}, {name}", call_of(ours, shape, backward),
                {peer: call_of(make, shape, backward) for peer, make in PEERS.items()},
                shape.flops(products), shape.dtype,
            )  # fmt: skip
            if shape == SHAPES[0]:
                added = {
                    who: extra_memory(partial(warm_call, make, shape, backward))
                    for who, make in {"ours": ours, **PEERS}.items()
                }
                run.add_to_all(f"{shape}, {name}", "bytes", added)


if __name__ == "__main__":
    main()
