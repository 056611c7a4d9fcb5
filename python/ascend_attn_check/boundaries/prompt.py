"""Both sides of each device rule of prompt_flash_attention, with the text of the error."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .rule import Rule

Arguments = dict[str, Any]


def meta(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def inputs(
    b: int = 2, sq: int = 6, skv: int = 9, n: int = 2, d: int = 16, dtype: Any = torch.float16
) -> Arguments:
    """In layout BNSD."""
    arguments: Arguments = {"num_heads": n, "layout": "BNSD", "scale_value": 1.0}
    arguments |= {"query": meta(b, n, sq, d, dtype=dtype)}
    return arguments | {name: meta(b, n, skv, d, dtype=dtype) for name in ("key", "value")}


def merged(**sizes: int) -> Arguments:
    """In layout BSH."""
    arguments = inputs(**sizes)
    for name in ("query", "key", "value"):
        b, n, s, d = arguments[name].shape
        arguments[name] = meta(b, s, n * d)
    return arguments | {"layout": "BSH"}


INT8: Arguments = inputs(dtype=torch.int8) | {
    name: meta(1, dtype=torch.float32) for name in ("deq_scale1", "quant_scale1", "deq_scale2")
}
MASK: Arguments = {"atten_mask": meta(6, 9, dtype=torch.bool)}
COMPRESSED = meta(2048, 2048, dtype=torch.bool)


def int8(**sizes: int) -> Arguments:
    return INT8 | inputs(dtype=torch.int8, **sizes)


A2, A3, P950, P310 = ("A2", "9.1"), ("A3", "9.1"), ("950", "9.1"), ("310P", "9.1")
PAIR: Arguments = {"layout": "BNSD_BSND"}
SCALE: Arguments = {"quant_scale2": meta(1, dtype=torch.float32)}
# A call that the device takes, one that it refuses, and what the error says.
BOUNDARIES: list[tuple[tuple[str, str], Arguments, Arguments, str]] = [
    *(
        (device, int8(**{size: 1}), int8(**{size: 0}), error)
        for device in (A2, A3)
        for size, error in (
            ("b", "query: expected B, Sq and Skv of at least 1 for int8 inputs on {}, got B = 0"),
            ("sq", "query: expected B, Sq and Skv of at least 1 for int8 inputs on {}, got Sq = 0"),
            ("skv", "key: expected B, Sq and Skv of at least 1 for int8 inputs on {}, got Skv = 0"),
        )
    ),
    *(
        (
            device,
            inputs() | MASK | {"actual_seq_lengths_query": [6, 6], "next_tokens": -5},
            inputs() | MASK | {"actual_seq_lengths_query": [6, 0], "next_tokens": -5},
            "next_tokens: expected a band that meets every batch, also one without queries or "
            "keys, on {}, got -5 for the 0 queries of batch 1",
        )
        for device in (A2, A3)
    ),
    *(
        (
            device,
            inputs() | {"atten_mask": COMPRESSED, "sparse_mode": 3, "next_tokens": -(2**31) + 2},
            inputs() | {"atten_mask": COMPRESSED, "sparse_mode": 3, "next_tokens": -(2**31) + 1},
            "next_tokens: expected more than -2147483647 in sparse_mode 3 on {}, got -2147483647",
        )
        for device in (A2, A3)
    ),
    (
        P950, inputs() | PAIR, inputs(d=24) | PAIR,
        "query: expected a D that is a multiple of 16 in layout BNSD_BSND on {}, got 24",
    ),
    (
        P950, inputs(d=32) | PAIR | SCALE, inputs(d=48) | PAIR | SCALE,
        "query: expected a D that is a multiple of 32 in layout BNSD_BSND for an int8 output on "
        "{}, got 48",
    ),
    (
        P310, inputs() | {"pre_tokens": 6}, inputs() | {"pre_tokens": 5},
        "pre_tokens: expected at least Sq on {}, got 5 for Sq = 6",
    ),
    (
        P310, inputs() | {"next_tokens": 9}, inputs() | {"next_tokens": 8},
        "next_tokens: expected 0, or at least Skv, on {}, got 8 for Skv = 9",
    ),
    (
        P310, merged(b=300), merged(b=301),
        "query: expected B in BSH (batch size in layout BSH) to be 0..300 on {}, got 301",
    ),
    (
        P310, inputs(b=128), inputs(b=129),
        "query: expected B (batch size) to be 0..128 on {}, got 129",
    ),
    (
        P310, inputs() | {"num_key_value_heads": 2},
        inputs() | {"num_key_value_heads": 1, "key": meta(2, 1, 9, 16), "value": meta(2, 1, 9, 16)},
        "num_key_value_heads: expected 0 or num_heads on {}, got 1",
    ),
]  # fmt: skip


def rules() -> Iterator[Rule]:
    for (product, cann), good, bad, error in BOUNDARIES:
        yield Rule(
            "prompt_flash_attention", error, (f"{product}:{cann}",), partial(dict, good),
            partial(dict, bad),
        )  # fmt: skip
