"""Calls that fused_infer_attention_score must refuse."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from ascend_attn_ops.check.samples.fused_infer_attention_score import (
    FUSED_INFER_ATTENTION_SCORE,
    InferCase,
)
from ascend_attn_ops.check.samples.masks import compressed_mask

from .wrong_call import (
    Product,
    WrongCall,
    bools,
    elsewhere,
    inference_mask_rules,
    normal,
    put,
    wrong_inference,
)

PLAIN = InferCase(s=(6, 9), heads=(4, 2), d=8)
BSH = replace(PLAIN, layout="BSH")
BSND = replace(PLAIN, layout="BSND")
THREE = replace(PLAIN, b=3, lengths=((6, 2, 0), (9, 4, 9)))
MASKED = replace(PLAIN, mask="BS")
BAND = replace(PLAIN, mode=4, pre=3, next=2)
PACK = InferCase(layout="TND", lengths=((3, 0, 6), (5, 2, 9)), heads=(4, 2), d=8)
PAGED = InferCase(layout="BSND", s=(2, 0), lengths=(None, (20, 7)), heads=(4, 2), d=16,
                  pages="rows")  # fmt: skip
BY_HEAD = replace(PAGED, pages="heads")
FRACTALS = replace(PAGED, pages="fractals")
PAGED_PACK = replace(PACK, d=16, pages="rows")
ROPES = replace(PLAIN, rope=4)
SINK = replace(PLAIN, sink="float32")

LENGTHS = ("actual_seq_lengths_query", "actual_seq_lengths_key")
COMPRESSED = compressed_mask(3, torch.bool)
TABLE = torch.tensor([[1, 2, 0], [3, 0, 0]], dtype=torch.int32)


wrong = partial(wrong_inference, FUSED_INFER_ATTENTION_SCORE)

RULES = [
    *(
        wrong(PLAIN, {"scale_value": x}, "scale_value", f"finite number of .*, got {words}")
        for x, words in [(math.nan, "nan"), (math.inf, "inf"), (1e39, "1e.39")]
    ),
    # Layouts, dtypes, heads, sizes.
    *(
        wrong(PLAIN, {"layout": x}, "layout", f"one of BSH, .*, TND_NTD, got '{x}'")
        for x in ("SBH", "NTD", "TND_NBSD", "")
    ),
    wrong(PLAIN, {"query": normal(2, 6, 32)}, "query", "rank 4"),
    wrong(BSH, {"key": normal(2, 9, 2, 8)}, "key", "rank 3"),
    wrong(BSH, {"value": normal(2, 9, 2, 8)}, "value", "rank 3"),
    wrong(PLAIN, {"query": torch.ones(2, 4, 6, 8).int()}, "query", "float16, bfloat16", TypeError),
    *(
        wrong(
            PLAIN,
            {name: torch.ones(2, 2, 9, 8).to(dtype)},
            name,
            f"got {str(dtype)[6:]}; torch_npu.npu_fused_infer_attention_score_v2",
            TypeError,
            id=f"{name}-{dtype}",
        )
        for name in ("key", "value")
        for dtype in (torch.int8, torch.float8_e4m3fn)
    ),
    wrong(PLAIN, {"key": normal(2, 2, 9, 8, dtype=torch.float16)}, "key", "bfloat16", TypeError),
    wrong(PLAIN, {"value": torch.ones(2, 2, 9, 8)}, "value", "bfloat16", TypeError),
    wrong(PLAIN, {"num_heads": 0}, "num_heads", "positive"),
    wrong(PLAIN, {"num_key_value_heads": -1}, "num_key_value_heads", "or 0"),
    wrong(PLAIN, {"num_key_value_heads": 3}, "num_key_value_heads", "divisor of num_heads"),
    wrong(PLAIN, {"num_heads": 2}, "query", "num_heads = 2 heads"),
    wrong(PLAIN, {"num_key_value_heads": 4}, "key", "num_key_value_heads = 4"),
    wrong(PLAIN, {"num_key_value_heads": 0}, "key", "num_key_value_heads = 4"),
    wrong(BSH, {"query": normal(2, 6, 33)}, "query", "multiple of num_heads = 4"),
    wrong(BSH, {"key": normal(2, 9, 32)}, "key", "num_key_value_heads = 2"),
    wrong(BSH, {"value": normal(2, 9, 33)}, "value", "multiple of num_key_value_heads = 2"),
    wrong(PLAIN, {"query": normal(2, 4, 6, 0)}, "query", "head size of at least 1"),
    wrong(PLAIN, {"value": normal(2, 2, 9, 0)}, "value", "head size of at least 1"),
    wrong(PLAIN, {"key": normal(2, 2, 9, 4)}, "key", "a head size of 8"),
    wrong(PLAIN, {"key": normal(3, 2, 9, 8)}, "key", r"\[2, 2, 9, 8\]"),
    wrong(PLAIN, {"value": normal(2, 2, 8, 8)}, "value", r"\[2, 2, 9, 8\]"),
    wrong(PLAIN, {"inner_precise": 4}, "inner_precise", "0 to 3, got 4"),
    wrong(PLAIN, {"inner_precise": -1}, "inner_precise", "0 to 3, got -1"),
    # Lengths.
    wrong(THREE, {LENGTHS[0]: [6, 2]}, LENGTHS[0], "one per batch, 3, got 2"),
    wrong(THREE, {LENGTHS[1]: [6, 2]}, LENGTHS[1], "one per batch, 3, got 2"),
    wrong(THREE, {LENGTHS[0]: [6, 2, 7]}, LENGTHS[0], r"0\.\.S = 6, got 7"),
    wrong(THREE, {LENGTHS[1]: [-1]}, LENGTHS[1], r"0\.\.S = 9, got -1"),
    wrong(PACK, {LENGTHS[0]: None}, LENGTHS[0], "cumulative .* TND, got None.*161001"),
    wrong(PACK, {LENGTHS[1]: None}, LENGTHS[1], "cumulative .* TND, got None.*161001"),
    wrong(PACK, {LENGTHS[0]: [3, 3, 8]}, LENGTHS[0], "end with all T = 9 tokens, got 8"),
    wrong(PACK, {LENGTHS[1]: [5, 7, 15]}, LENGTHS[1], "end with all T = 16 tokens, got 15"),
    wrong(PACK, {LENGTHS[0]: [3, 2, 9]}, LENGTHS[0], "never decrease"),
    wrong(PACK, {LENGTHS[1]: [5, 16]}, LENGTHS[1], "as many lengths as .*, 3, got 2"),
    wrong(PAGED, {LENGTHS[1]: None}, LENGTHS[1], "number of keys .* block_table, got None.*161001"),
    wrong(PAGED, {LENGTHS[1]: [49, 7]}, LENGTHS[1], r"0\.\.S = 48, got 49"),
    wrong(PAGED_PACK, {LENGTHS[1]: [5, 2]}, LENGTHS[1], "as many lengths as .*, 3, got 2"),
    wrong(PAGED_PACK, {LENGTHS[1]: [5, 33, 9]}, LENGTHS[1], r"0\.\.S = 32, got 33"),
    # Pages.
    wrong(PAGED, {"block_table": TABLE.long()}, "block_table", "int32", TypeError),
    wrong(PAGED, {"block_table": TABLE[0]}, "block_table", "blocks of a sequence"),
    wrong(PAGED, {"block_table": TABLE[:1]}, "block_table", "blocks of a sequence"),
    wrong(PAGED, {"block_size": 32}, "block_size", "key's block_size, 16, or 0, got 32"),
    wrong(PAGED, {"key": normal(7, 32)}, "key", "pages of shape"),
    wrong(PAGED, {"key": normal(7, 24, 32)}, "key", "positive multiple of 16"),
    wrong(PAGED, {"key": normal(7, 0, 32)}, "key", "positive multiple of 16"),
    wrong(PAGED, {"key": normal(7, 16, 33)}, "key", r"\(num_blocks, block_size, Nk \* D\)"),
    wrong(PAGED, {"value": normal(7, 2, 16, 16)}, "value", "rank 3 as key has"),
    wrong(PAGED, {"value": normal(6, 16, 32)}, "value", r"\(num_blocks, block_size, Nk \* D\)"),
    wrong(BY_HEAD, {"key": normal(7, 16, 16, 2)}, "key", r"\(num_blocks, Nk, block_size, D\)"),
    wrong(FRACTALS, {"key": normal(7, 2, 1, 16, 32)}, "key", r"D / 16, block_size, 16\)"),
    wrong(
        FRACTALS,
        {"query": normal(2, 2, 4, 24), "key": normal(7, 2, 1, 16, 24)},
        "query",
        "multiple of 16 for keys in fractals, got 24",
    ),
    # Ropes and sinks.
    wrong(ROPES, {"query_rope": None}, "query_rope", "because key_rope is given.*161001"),
    wrong(ROPES, {"key_rope": None}, "key_rope", "because query_rope is given.*161001"),
    wrong(ROPES, {"query_rope": normal(2, 4, 6, 5)}, "query_rope", "key_rope's head size"),
    wrong(ROPES, {"key_rope": normal(2, 2, 8, 4)}, "key_rope", r"\[2, 2, 9, 4\]"),
    wrong(ROPES, {"key_rope": torch.ones(2, 2, 9, 4)}, "key_rope", "bfloat16", TypeError),
    wrong(SINK, {"sink": torch.ones(3)}, "sink", r"\(num_heads\)"),
    wrong(SINK, {"sink": torch.ones(4, 1)}, "sink", r"\(num_heads\)"),
    wrong(SINK, {"sink": torch.ones(4).half()}, "sink", "or float32, got float16", TypeError),
    # Masks and bands.
    *inference_mask_rules(wrong, PLAIN, MASKED, BAND),
    wrong(
        replace(MASKED, s=(1, 9), mask="S"),
        {"atten_mask": bools(3, 9)},
        "atten_mask",
        r"\(B, Skv\) where Sq = 1",
    ),
    wrong(PAGED, {"atten_mask": bools(2, 2, 47)}, "atten_mask", "block_table has room for"),
    wrong(PACK, {"atten_mask": bools(1, 6, 9)}, "atten_mask", "None in sparse_mode 0 .* TND"),
]  # fmt: skip


def devices() -> Iterator[WrongCall]:
    case = replace(PAGED, mask="BS", rope=16, sink="float32")
    for name in ("key", "value", "atten_mask", "query_rope", "key_rope", "sink", "block_table"):
        expected = r"expected device cpu \(query's\), got meta"
        yield wrong(case, put(name, elsewhere), name, expected, id=name, on_meta=False)


def values() -> Iterator[WrongCall]:
    for name, mask in {
        "inverted": COMPRESSED.logical_not(),
        "zeros": torch.zeros_like(COMPRESSED),
    }.items():
        change = {"atten_mask": mask}
        expected = r"got other values; True \(1\) masks"
        yield wrong(BAND, change, "atten_mask", expected, id=name, on_meta=False)
    # Block 1 of the first sequence is read, its third one is not.
    for block in (-1, 7, 2**31 - 1, -(2**31)):
        table = torch.tensor([[1, block, block], [2, block, block]], dtype=torch.int32)
        expected = rf"block numbers in 0..6, got {block} at \[0, 1\], for the 20 keys"
        for case in (PAGED, BY_HEAD, FRACTALS):
            yield wrong(case, {"block_table": table}, "block_table", expected, on_meta=False)


def gradients() -> Iterator[WrongCall]:
    """There are none: flash_attention_score has them."""
    for case, name in (
        *((PLAIN, name) for name in ("query", "key", "value")),
        (SINK, "sink"),
        (ROPES, "key_rope"),
    ):
        yield WrongCall(
            f"gradient of {name}", FUSED_INFER_ATTENTION_SCORE, case,
            lambda sample, name=name: sample.requires_grad((name,)), name, NotImplementedError,
            "flash_attention_score",
        )  # fmt: skip


def limits() -> Iterator[WrongCall]:
    def wrong(
        product: Product,
        case: InferCase,
        argument: str,
        expected: str,
        exception: type[Exception] = ValueError,
        change: dict[str, Any] | None = None,
        dtype: torch.dtype = torch.float16,
    ) -> WrongCall:
        return WrongCall(
            f"{product}-{case.id}-{expected}", FUSED_INFER_ATTENTION_SCORE, case, change,
            argument, exception, rf"^(?=.*Ascend {product}).*{expected}", limits=product,
            dtype=dtype,
        )  # fmt: skip

    plain = InferCase(s=(6, 9))
    pack = replace(PACK, d=64)
    paged = replace(PAGED, d=64)
    absorbed = replace(PAGED, layout="BNSD", heads=(8, 1), d=512, rope=64)
    yield from (
        wrong("310P", plain, "product", "a product that has aclnnFusedInfer", NotImplementedError),
        wrong("A2", plain, "query", "float16 or bfloat16", TypeError, dtype=torch.float32),
        wrong("A2", replace(plain, heads=(257, 1)), "query", r"expected N .* 1\.\.256"),
        wrong("A2", replace(plain, d=20), "query", "expected D .* multiple of 16"),
        wrong("950", replace(plain, d=528), "query", "expected D "),
        wrong("A2", replace(plain, dv=128), "value", "or 128 beside 192"),
        wrong("A2", replace(pack, d=80), "query", "64 or 128, or 192 with values .* in packed"),
        wrong("A2", replace(pack, d=192), "query", "values of 128, .* got 192 and 192 in layout"),
        wrong("A2", replace(plain, layout="BSH_BNSD", d=80), "query", "layouts, BSH_BNSD and"),
        wrong("A2", replace(plain, layout="BSH_NBSD"), "layout", "for absorbed MLA alone"),
        wrong("A2", replace(plain, rope=64), "query_rope", "Dr of 64, beside D of 128 or 512"),
        wrong("A2", replace(plain, d=128, rope=32), "query_rope", "Dr of 64, beside"),
        wrong("A2", replace(absorbed, dv=128, pages="heads"), "value", "128 beside 192"),
        wrong("A2", replace(absorbed, heads=(8, 2)), "num_key_value_heads", "1 for absorbed MLA"),
        wrong("A2", replace(absorbed, heads=(12, 1)), "num_heads", "a power of two up to 128"),
        wrong("A2", replace(absorbed, pages="", lengths=(None, None), s=(2, 9)), "block_table",
              "a tensor for absorbed MLA"),
        wrong("A2", replace(absorbed, layout="BNSD_BSND"), "layout", "NBSD or NTD for absorbed"),
        wrong("A2", replace(absorbed, mode=2), "sparse_mode", "0, 3 or 4 for absorbed MLA"),
        wrong("A2", replace(absorbed, layout="TND", lengths=((1, 2), (20, 7)), lse=True),
              "return_softmax_lse", "False for absorbed MLA in packed layouts"),
        wrong("A2", replace(pack, mode=2), "sparse_mode", "0, 3 or 4 in packed layouts"),
        wrong("A2", pack, "inner_precise", "0 in packed layouts", change={"inner_precise": 1}),
        wrong("A2", replace(pack, mode=4), "pre_tokens, next_tokens", "at least -Lq and -Lk",
              change={"pre_tokens": -4}),
        wrong("A2", replace(paged, block_size=1040), "key", "block_size of at most 1024"),
        wrong("A2", replace(paged, d=80), "key", "block_size of 128, or a multiple"),
        wrong("A2", replace(paged, d=80, s=(1, 0), block_size=528), "key", "at most 512"),
        wrong("A2", replace(paged, heads=(256, 256), d=256, block_size=128), "key",
              "H of at most 65535"),
        wrong("A2", replace(paged, pages="fractals", d=80, block_size=128), "key",
              "D of 64 or 128 in fractal pages"),
        wrong("A2", replace(paged, d=192, dv=128, block_size=128), "value", "shape in pages"),
        wrong("A2", replace(plain, d=80, sink="query"), "sink", "head size is 64 or 128"),
        wrong("A2", replace(plain, sink="query"), "inner_precise", "0 beside a sink",
              change={"inner_precise": 2}),
    )  # fmt: skip


WRONG_CALLS = [*RULES, *devices(), *values(), *gradients(), *limits()]
