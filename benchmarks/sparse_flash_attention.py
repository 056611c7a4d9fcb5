"""sparse_flash_attention and its gradient against plain torch.

    python benchmarks/sparse_flash_attention.py

Each query token selects K of the keys before it at random; value is key. Every implementation
computes what the operator returns; FLOPs are counted for the selected pairs only.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from types import ModuleType

import ascend_attn_ops
import torch
from ascend_attn_ops import reference
from harness import Call, Row, causal_selection, extra_memory, measure, recorder, report
from results import Recorder, parser
from torch import Tensor

OURS = torch.ops.ascend
D, ROPE = 512, 64
SCALE = 192**-0.5  # DeepSeek-V3.2, with heads of 128 + 64 before absorption


@dataclass(frozen=True)
class Shape:
    tokens: int
    selected: int
    heads: int = 64
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"S={self.tokens} K={self.selected} N1={self.heads} {dtype}"

    def pairs(self) -> int:
        """Return the number of selected token-key pairs; causal, so early tokens have fewer."""
        return sum(min(self.selected, token + 1) for token in range(self.tokens))

    def forward_flops(self) -> int:
        return 2 * self.heads * self.pairs() * (2 * D + ROPE)

    def backward_flops(self) -> int:
        return 2 * self.heads * self.pairs() * (5 * D + 3 * ROPE)


@dataclass(frozen=True)
class Inputs:
    query: Tensor
    query_rope: Tensor
    key: Tensor  # and value
    key_rope: Tensor
    sparse_indices: Tensor
    d_out: Tensor

    @staticmethod
    def random(shape: Shape) -> Inputs:
        torch.manual_seed(0)
        s, n = shape.tokens, shape.heads

        def normal(*sizes: int) -> Tensor:
            return torch.randn(1, *sizes).to(shape.dtype)

        return Inputs(
            query=normal(s, n, D),
            query_rope=normal(s, n, ROPE),
            key=normal(s, 1, D),
            key_rope=normal(s, 1, ROPE),
            sparse_indices=causal_selection(s, shape.selected),
            d_out=normal(s, n, D),
        )


Forward = tuple[Tensor, Tensor, Tensor]


def forward_of(operators: ModuleType, x: Inputs) -> Forward:
    """Call the operator of `operators`: torch.ops.ascend, or the package's reference."""
    outputs: Forward = operators.sparse_flash_attention(
        x.query,
        x.key,
        x.key,
        x.sparse_indices,
        scale_value=SCALE,
        query_rope=x.query_rope,
        key_rope=x.key_rope,
    )
    return outputs


def backward_of(operators: ModuleType, x: Inputs, forward: Forward) -> object:
    return operators.sparse_flash_attention_grad(
        x.query,
        x.key,
        x.key,
        x.sparse_indices,
        x.d_out,
        *forward,
        scale_value=SCALE,
        query_rope=x.query_rope,
        key_rope=x.key_rope,
    )


class PlainTorch:
    """The formulas of both operators; subclasses choose the keys that each token multiplies."""

    def __init__(self, x: Inputs) -> None:
        self.query = torch.cat((x.query, x.query_rope), -1)[0]
        self.all_keys = torch.cat((x.key, x.key_rope), -1)[0, :, 0]
        self.indices = x.sparse_indices[0, :, 0].long()
        self.d_out = x.d_out[0]

    def keys(self) -> tuple[Tensor, Tensor]:
        """Return the keys of each token, (S or 1, n, D + Dr), and which of them count, (S, n)."""
        raise NotImplementedError

    def sum_by_key(self, by_token: Tensor, rows: Tensor) -> Tensor:
        """Sum over tokens and heads, per key: (S, N, n) and (S, N, size) to (keys, size)."""
        raise NotImplementedError

    def probabilities(self, keys: Tensor, counts: Tensor) -> Tensor:
        scores = (self.query @ keys.mT).float() * SCALE
        return scores.masked_fill_(~counts[:, None], -torch.inf).softmax(-1)

    def forward(self) -> Tensor:
        keys, counts = self.keys()
        return self.probabilities(keys, counts).to(keys.dtype) @ keys[..., :D]

    def backward(self, out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        keys, counts = self.keys()
        p = self.probabilities(keys, counts)
        d_p = (self.d_out @ keys[..., :D].mT).float()
        delta = (self.d_out.float() * out[0].float()).sum(-1, keepdim=True)
        d_s = (p * (d_p - delta)).to(keys.dtype)
        d_query = d_s @ keys * SCALE
        d_key = self.sum_by_key(d_s, self.query) * SCALE
        d_value = self.sum_by_key(p.to(keys.dtype), self.d_out)
        return d_query, d_key.to(keys.dtype), d_value.to(keys.dtype)


class Gathering(PlainTorch):
    """Copies the selected keys of every token side by side."""

    def keys(self) -> tuple[Tensor, Tensor]:
        return self.all_keys[self.indices.clamp(min=0)], self.indices >= 0

    def sum_by_key(self, by_token: Tensor, rows: Tensor) -> Tensor:
        sums = torch.zeros(len(self.all_keys), rows.shape[-1])
        parts = (by_token.mT @ rows).flatten(0, 1).float()
        return sums.index_add_(0, self.indices.clamp(min=0).flatten(), parts)


class Masking(PlainTorch):
    """Computes all pairs of tokens and masks out those that are not selected."""

    def keys(self) -> tuple[Tensor, Tensor]:
        keys = len(self.all_keys)
        counts = torch.zeros(len(self.indices), keys + 1, dtype=torch.bool)
        columns = torch.where(self.indices < 0, keys, self.indices)
        counts.scatter_(1, columns, torch.ones_like(columns, dtype=torch.bool))
        return self.all_keys, counts[:, :keys]

    def sum_by_key(self, by_token: Tensor, rows: Tensor) -> Tensor:
        return by_token.flatten(0, 1).mT @ rows.flatten(0, 1)


def rows_of(shape: Shape, with_torch: bool, rounds: int) -> list[Row]:
    x = Inputs.random(shape)
    forward = forward_of(OURS, x)
    forwards: dict[str, Call] = {}
    backwards: dict[str, Call] = {}
    if with_torch:
        forwards["reference"] = partial(forward_of, reference, x)
        backwards["reference"] = partial(backward_of, reference, x, forward)
        for name, version in (("gathering", Gathering(x)), ("masking", Masking(x))):
            forwards[f"torch, {name}"] = version.forward
            backwards[f"torch, {name}"] = partial(version.backward, forward[0])
    return measure(
        f"sparse_flash_attention {shape}",
        partial(forward_of, OURS, x),
        forwards,
        products=shape.forward_flops(),
        rounds=rounds,
    ) + measure(
        f"sparse_flash_attention_grad {shape}",
        partial(backward_of, OURS, x, forward),
        backwards,
        products=shape.backward_flops(),
        rounds=rounds,
    )


def first_backward(shape: Shape, threads: int) -> Call:
    """Prepare what the gradient reads, in a fresh process, and return the call to measure."""
    torch.set_num_threads(threads)
    x = Inputs.random(shape)
    with ascend_attn_ops.limits(None):
        # Loads libraries and generates code, in all threads.
        small = Inputs.random(Shape(256, 256, shape.heads, shape.dtype))
        backward_of(OURS, small, forward_of(OURS, small))
        forward = forward_of(OURS, x)

    def call() -> object:
        with ascend_attn_ops.limits(None):
            return backward_of(OURS, x, forward)

    return call


def report_memory(record: Recorder, shape: Shape, threads: int) -> None:
    bytes_per_element = shape.dtype.itemsize
    outputs = shape.tokens * (shape.heads * (D + ROPE) + 2 * D + ROPE) * bytes_per_element
    accumulators = 4 * threads * shape.tokens * (2 * D + ROPE)
    extra = extra_memory(partial(first_backward, shape, threads))
    case = f"sparse_flash_attention_grad {shape}"
    print(
        f"{case}: extra memory {extra / 2**20:.0f} MB, outputs and accumulators "
        f"{(outputs + accumulators) / 2**20:.0f} MB",
        flush=True,
    )
    record.add(case, "ours", bytes=extra, bytes_needed=outputs + accumulators)


def main() -> None:
    arguments = parser(__doc__, rounds=5).parse_args()
    record = recorder("sparse_flash_attention", arguments.json)
    with ascend_attn_ops.limits(None):
        rows = rows_of(Shape(1024, 256), True, arguments.rounds)
        rows += rows_of(Shape(1024, 256, dtype=torch.float16), False, arguments.rounds)
        for tokens in (2048, 4096, 8192):
            rows += rows_of(Shape(tokens, 256), False, arguments.rounds)
    report(record, rows)
    for selected in (256, 1024):
        report_memory(record, Shape(1024, selected), torch.get_num_threads())


if __name__ == "__main__":
    main()
