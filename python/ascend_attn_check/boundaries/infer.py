"""Both sides of each rule of fused_infer_attention_score, with the text of the error.

A table for each source of the rules: what CANN's code checks, and what its documents say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ascend_attn_check.samples.fused_infer_attention_score import InferCase

from .rule import Rule
from .sparse import HALF, Arguments, meta

Call = Callable[[], Arguments]

PLAIN = InferCase(s=(6, 9))
PACK = InferCase(layout="TND", lengths=((3, 6), (5, 9)))
PAGED = InferCase(layout="BSND", s=(2, 0), lengths=(None, (20, 7)), heads=(4, 2), pages="rows")
PAGED_PACK = replace(PAGED, layout="TND", lengths=((1, 2), (20, 7)))
ABSORBED = replace(PAGED, heads=(8, 1), d=512, rope=64)
ABSORBED_PACK = replace(ABSORBED, layout="TND", lengths=((1, 2), (20, 7)))
SINK = replace(PLAIN, sink="float32")
INT8 = replace(PAGED, d=128, pages="fractals", block_size=128, s=(16, 0), mode=3, quant="channel")
INT8_PACK = replace(INT8, layout="TND", lengths=((1, 2), (20, 7)))
INT8_QUERY = replace(ABSORBED, pages="fractals", block_size=128, s=(16, 0), mode=3, quant="query")
LONG = replace(PLAIN, b=1, heads=(1, 1), d=16)
A2, A3, P950 = "A2:9.1", "A3:9.1", "950:9.1"
OLD, OLD_950 = "A2:8.5", "950:9.0"
ATLAS, ALL = (A2, A3), (A2, A3, P950)


def arguments(case: InferCase, options: Arguments) -> Arguments:
    """Returns a call of the case on meta tensors."""
    n, nk = case.heads
    of_keys, of_query = torch.int8 if case.quant else HALF, case.quant == "query"
    given: Arguments = {
        "query": meta(*case.shape(0, case.d), dtype=torch.int8 if of_query else HALF),
        "key": meta(*case.shape_of_keys(case.d, bool(case.quant)), dtype=of_keys),
        "value": meta(*case.shape_of_keys(case.dv or case.d, bool(case.quant)), dtype=of_keys),
        "num_heads": n,
        "num_key_value_heads": nk,
        "layout": case.layout,
        "scale_value": 0.1,
        "sparse_mode": case.mode,
        "pre_tokens": case.pre,
        "next_tokens": case.next,
        "return_softmax_lse": case.lse,
        **case.length_options(),
    }
    if case.rope:
        given["query_rope"] = meta(*case.shape(0, case.rope))
        given["key_rope"] = meta(*case.shape_of_keys(case.rope))
    if case.pages:
        given["block_table"] = meta(case.sequences, case.blocks, dtype=torch.int32)
        given["block_size"] = case.block_size
    if case.mode >= 2:
        given["atten_mask"] = meta(2048, 2048, dtype=torch.bool)
    if case.sink:
        given["sink"] = meta(n, dtype=torch.float32 if case.sink == "float32" else HALF)
    if case.quant:
        by_token = case.quant == "token"
        dtype = torch.float32 if case.quant != "channel" else HALF
        scale = meta(*case.shape_of_scale(case.d), dtype=dtype)
        if of_query:
            by_head = replace(case, layout="BSND") if case.inputs == "BSH" else case
            given["dequant_scale_query"] = meta(*by_head.shape(0, 1)[:-1], dtype=dtype)
            given["query_quant_mode"] = 3
        for name in ("key", "value"):
            given[f"{name}_antiquant_scale"] = scale
            given[f"{name}_antiquant_mode"] = int(by_token)
    return given | options


def call(case: InferCase, **sizes: Any) -> Call:
    options = {"inner_precise": sizes.pop("inner_precise", int(bool(case.quant)))}
    return partial(arguments, replace(case, **sizes), options)


ABSORBED_ALONE = "layout: expected an output in NBSD or NTD for absorbed MLA alone on {}, got "
LSE = "return_softmax_lse: expected False for "
INT8_MODE = (
    "sparse_mode: expected 3, or 0 without a mask where Sq is 1, beside int8 keys on {}, got "
)
BAND = "pre_tokens, next_tokens: expected at least -Lq and -Lk in sparse_mode 4 of packed layouts "
VALUE = "value: expected query's D as head size, or 128 beside 192 on {}, got "
PLAIN_VALUE = (
    "value: expected query's D as head size, or 128 beside 192, in pairs of layouts, beside pages, "
    "ropes, a sink or softmax_lse, and in sparse_mode 1 or 4 on {}, got "
)
PAIR_SIZES = (
    "query: expected D of 64 or 128, or 192 with values of 128, in NTD_TND, BSH_BNSD and BSND_BNSD "
    "on {}, got "
)
PAGES = "key: expected block_size of "

# Devices, what they accept, what they refuse, and the error.
Row = tuple[tuple[str, ...], Call, Call, str]

# Calls that the host code refuses.
CHECKED: list[Row] = [
    (ATLAS, call(PACK, d=256), call(PACK, d=272),
     "query: expected D of at most 256, or absorbed MLA, in layout TND on {{device}}, got 272"),
    *(((OLD,), call(PACK, d=192, dv=128), call(PACK, d=d),
       "query: expected D of 64 or 128, 192 with values of 128, or absorbed MLA, in layout TND on "
       f"{{}}, got {d} and {d}") for d in (80, 192)),
    *((ALL, call(case, d=192, dv=128), call(case, d=192),
       f"{PAIR_SIZES}192 and 192 in layout {case.layout}")
      for case in (replace(PACK, layout="NTD_TND"), replace(PLAIN, layout="BSH_BNSD"),
                   replace(PLAIN, layout="BSND_BNSD"))),
    ((P950,), call(PLAIN, layout="BNSD_BSND", d=48), call(PLAIN, layout="BNSD_BSND", d=40),
     "query: expected a multiple of 16 as D in BNSD_BSND on {}, got 40"),
    ((P950,), call(PLAIN, d=128, dv=80), call(PLAIN, d=129, dv=80),
     "value: expected query's D as head size, 128 beside 192, or another one if both are at most "
     "128 on {}, got 80"),
    *(((P950,), call(PLAIN, d=128, dv=64), call(case, d=128, dv=64), f"{PLAIN_VALUE}64 beside 128")
      for case in (replace(PACK, layout="NTD_TND"), replace(PLAIN, layout="BNSD_BSND"), PAGED, SINK,
                   replace(PLAIN, rope=64), replace(PLAIN, lse=True), replace(PLAIN, mode=4))),
    ((OLD_950,), call(ABSORBED, s=(16, 0)), call(ABSORBED, s=(17, 0)),
     "query: expected at most 16 tokens per sequence for absorbed MLA on {}, got 17"),
    ((OLD_950,), call(ABSORBED_PACK, lengths=((16, 16), (20, 7))),
     call(ABSORBED_PACK, lengths=((16, 17), (20, 7))),
     "query: expected at most 16 tokens per sequence for absorbed MLA on {}, got 17"),
    ((OLD_950,), call(ABSORBED), call(ABSORBED, lengths=((1, 2), (20, 7))),
     "actual_seq_lengths_query: expected None for absorbed MLA outside packed layouts on {}, got "
     "lengths in layout BSND"),
    *((ALL, call(absorbed, layout=layout), call(other, layout=layout),
       f"{ABSORBED_ALONE}{layout} with D 64")
      for absorbed, other, layout in (
          (ABSORBED, PLAIN, "BSND_NBSD"), (ABSORBED, PLAIN, "BNSD_NBSD"),
          (ABSORBED_PACK, PACK, "TND_NTD"))),
    *((ALL, call(ABSORBED), call(ABSORBED, layout=layout),
       "layout: expected BSH, BSND, BNSD, TND or an output in NBSD or NTD for absorbed MLA on {}, "
       f"got {layout}") for layout in ("BSND_BNSD", "BNSD_BSND")),
    *((ALL, call(PLAIN, d=128, rope=64), call(PLAIN, d=d, rope=rope),
       f"query_rope: expected Dr of 64, beside D of 128 or 512 on {{}}, got Dr {rope} beside D {d}")
      for d, rope in ((64, 64), (128, 32))),
    (ATLAS, call(PAGED, pages="fractals", d=128),
     call(PAGED, pages="fractals", d=96, block_size=128),
     "key: expected D of 64 or 128 in fractal pages, or ropes on {}, got 96"),
    (ALL, call(SINK), call(SINK, inner_precise=1),
     "inner_precise: expected 0 beside a sink on {}, got 1"),
]  # fmt: skip

# Calls that the documents exclude.
DOCUMENTED: list[Row] = [
    (ALL, call(PLAIN, b=65536), call(PLAIN, b=65537),
     "query: expected B (batch size, or the number of packed sequences) to be 0..65536 on {}, got "
     "65537"),
    (ATLAS, call(PLAIN, heads=(256, 256)), call(PLAIN, heads=(257, 257)),
     "query: expected N (query heads) to be 1..256 on {}, got 257"),
    *((ATLAS, call(PLAIN, d=good), call(PLAIN, d=bad),
       f"query: expected D (head size) to be a multiple of 16 in 16..512 on {{}}, got {bad}")
      for good, bad in ((16, 8), (48, 40), (512, 528))),
    ((P950,), call(PLAIN, d=512), call(PLAIN, d=513),
     "query: expected D (head size) to be 1..512 on {}, got 513"),
    *((ALL, call(LONG, s=good), call(LONG, s=bad),
       f"{name}: expected S (tokens per sequence) to be 0..20971520 on {{}}, got 20971521")
      for name, good, bad in (("query", (20971520, 1), (20971521, 1)),
                              ("key", (2, 20971520), (2, 20971521)))),
    (ATLAS, call(PLAIN, d=192, dv=128), call(PLAIN, d=192, dv=64), f"{VALUE}64"),
    (ATLAS, call(PLAIN, d=64), call(PLAIN, d=64, dv=128), f"{VALUE}128"),
    *((ATLAS, call(PACK, heads=(4, 2)), call(PACK, heads=(4, 2), inner_precise=x),
       f"inner_precise: expected 0 in packed layouts whose heads share keys on {{}}, got {x}")
      for x in (1, 2)),
    *((ATLAS, call(PACK, mode=3), call(PACK, mode=mode),
       f"sparse_mode: expected 0, 3 or 4 in packed layouts on {{}}, got {mode}") for mode in (2,)),
    *((ATLAS, call(PACK, mode=4, pre=good[0], next=good[1]),
       call(PACK, mode=4, pre=bad[0], next=bad[1]),
       f"{BAND}on {{}}, got {bad[0]} and {bad[1]} for 3 queries and 5 keys")
      for good, bad in (((-3, 9), (-4, 9)), ((9, -5), (9, -6)))),
    # Absorbed latent attention.
    *((ALL, call(ABSORBED, heads=(good, 1)), call(ABSORBED, heads=(bad, 1)),
       f"num_heads: expected a power of two up to 128 for absorbed MLA on {{}}, got {bad}")
      for good, bad in ((128, 256), (16, 24))),
    (ALL, call(ABSORBED), call(ABSORBED, heads=(8, 2)),
     "num_key_value_heads: expected 1 for absorbed MLA on {}, got 2"),
    (ATLAS, call(ABSORBED), call(ABSORBED, pages="", s=(2, 20), lengths=(None, None)),
     "block_table: expected a tensor for absorbed MLA on {}, got None"),
    (ALL, call(ABSORBED, mode=3), call(ABSORBED, mode=2),
     "sparse_mode: expected 0, 3 or 4 for absorbed MLA on {}, got 2"),
    (ATLAS, call(ABSORBED, lse=True), call(ABSORBED_PACK, lse=True),
     f"{LSE}absorbed MLA in packed layouts on {{}}, got True for layout TND"),
    ((OLD,), call(ABSORBED, lse=True), call(ABSORBED, layout="BSND_NBSD", lse=True),
     f"{LSE}an output in NBSD or NTD on {{}}, got True for layout BSND_NBSD"),
    # Pages.
    *((ALL, call(PAGED, pages=pages, block_size=1024), call(PAGED, pages=pages, block_size=1040),
       f"{PAGES}at most 1024 on {{}}, got 1040") for pages in ("rows", "heads", "fractals")),
    (ALL, call(PAGED, d=96, block_size=128), call(PAGED, d=96, block_size=64),
     f"{PAGES}128, or a multiple of it, for this D and Sq > 1 on {{}}, got 64"),
    (ALL, call(PAGED, d=96, s=(1, 0), block_size=512), call(PAGED, d=96, s=(1, 0), block_size=528),
     f"{PAGES}at most 512 for this D and Sq = 1 on {{}}, got 528"),
    ((P950,), call(PAGED_PACK, d=96, block_size=128), call(PAGED_PACK, d=96, block_size=64),
     f"{PAGES}128, or a multiple of it, for this D and Sq > 1 on {{}}, got 64"),
    ((P950,), call(PAGED_PACK, d=96, lengths=((1, 1), (20, 7)), block_size=512),
     call(PAGED_PACK, d=96, lengths=((1, 1), (20, 7)), block_size=528),
     f"{PAGES}at most 512 for this D and Sq = 1 on {{}}, got 528"),
    (ALL, call(PAGED, d=240, heads=(256, 256), block_size=128),
     call(PAGED, d=256, heads=(256, 256), block_size=128),
     "key: expected H of at most 65535 in pages (num_blocks, block_size, H) on {}, got 65536"),
    ((*ATLAS, OLD_950), call(PAGED, d=192, block_size=128),
     call(PAGED, d=192, dv=128, block_size=128),
     "value: expected key's shape in pages on {}, got a head size of 128 beside 192"),
    # Int8 keys.
    (ATLAS, call(INT8_QUERY), call(INT8_QUERY, d=128),
     "query: expected D of 512 in int8 on {}, got 128"),
    (ATLAS, call(INT8_QUERY), call(INT8_QUERY, block_size=256),
     f"{PAGES}128 for int8 queries on {{}}, got 256"),
    (ATLAS, call(INT8_QUERY), call(INT8_QUERY, layout="BNSD"),
     "layout: expected another one than BNSD for int8 queries on {}, got BNSD"),
    ((P950,), call(PAGED, pages="fractals"), call(INT8),
     "key_antiquant_scale: expected None on {}, got a tensor"),
    *((ATLAS, call(INT8), call(INT8, **change), text) for change, text in (
        ({"d": 64}, "query: expected D of 128 beside int8 keys on {}, got 64"),
        ({"s": (17, 0)},
         "query: expected at most 16 tokens per sequence beside int8 keys on {}, got 17"),
        ({"block_size": 256}, f"{PAGES}128 or 512 for int8 keys on {{}}, got 256"),
        ({"layout": "BSND_BNSD"},
         "layout: expected BSH, BSND, BNSD or TND beside int8 keys on {}, got BSND_BNSD"),
        ({"inner_precise": 0}, "inner_precise: expected 1 beside int8 keys on {}, got 0"),
        ({"mode": 4}, f"{INT8_MODE}4"),
        ({"mode": 0}, f"{INT8_MODE}0"),
        ({"lse": True}, "return_softmax_lse: expected False beside int8 keys on {}, got True"))),
    (ATLAS, call(INT8, quant="token"),
     lambda: call(INT8, quant="token")() | {"query": meta(*INT8.shape(0, 128), dtype=torch.half)},
     "query: expected bfloat16 beside int8 keys on {}, got float16"),
    (ATLAS, call(INT8, quant="token"), call(INT8_PACK, quant="token"),
     "key_antiquant_mode: expected 0 in layout TND on {}, got 1"),
    ((OLD,), call(INT8), call(INT8_PACK),
     "layout: expected BSH, BSND or BNSD beside int8 keys on {}, got TND"),
    # Sinks.
    (ALL, call(SINK, d=128), call(SINK, d=96),
     "sink: expected None unless the values' head size is 64 or 128 on {}, got 96"),
    ((OLD,), call(PLAIN), call(SINK), "sink: expected None on {}, got a tensor"),
]  # fmt: skip


def rules() -> Iterator[Rule]:
    for devices, inside, outside, message in CHECKED + DOCUMENTED:
        for device in devices:
            product, _, cann = device.partition(":")
            name = f"Ascend {product}" + (f" with CANN {cann}" if device in (OLD, OLD_950) else "")
            text = message.format(name)
            yield Rule("fused_infer_attention_score", text, (device,), inside, outside)
