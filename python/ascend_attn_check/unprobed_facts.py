"""Statements of docs/specification/device.md that no probe tries, and why."""

from __future__ import annotations

from dataclasses import dataclass

ALL = ("A2", "A3", "950", "310P")
SPARSE = ("A2", "A3", "950")
PROMPT = ("A2", "A3", "310P")
P950 = ("950",)
FUSED = ("A2", "A3", "950")
ATLAS = ("A2", "A3")


@dataclass(frozen=True)
class Unprobed:
    id: str
    operator: str
    quote: str  # of the page, as for a fact
    why: str
    products: tuple[str, ...] = ALL


LIMITS = "the section limits has the calls"
ENVIRONMENT = "the section environment looks for the function"
ARGUMENT = "torch_npu's operator has no such argument; behaviour tries determinism"
ROUNDING = "ties are too rare to tell it from other roundings within the tolerances"
ALWAYS = "this library never makes such a call, and so does not depend on it"
SINKS = "the section numbers calls the functions with sinks and ropes"

LI, LIG = "lightning_indexer", "lightning_indexer_grad"
SFA, SFAG = "sparse_flash_attention", "sparse_flash_attention_grad"
KL = "sparse_lightning_indexer_grad_kl_loss"
FA, FAG = "flash_attention_score", "flash_attention_score_grad"
PFA, SCATTER = "prompt_flash_attention", "scatter_pa_kv_cache_"
FIA = "fused_infer_attention_score"
MLA, MLAG = "sparse_flash_mla", "sparse_flash_mla_grad"
KLG = "sparse_lightning_indexer_kl_loss_grad"

UNPROBED = [
    *(
        Unprobed(id, operator, "Ascend 950 has the function from CANN 9.1", ENVIRONMENT, ("950",))
        for id, operator in (
            ("li-950", LI), ("sfa-950", SFA), ("sfag-950", SFAG), ("kl-950", KL)
        )
    ),
    Unprobed("li-grad-large-key", LIG, "a key of 2^32 elements or more",
             "such a key takes 8 GB", SPARSE),
    Unprobed("li-grad-deterministic", LIG, "This function obeys its argument `deterministic`",
             ARGUMENT, SPARSE),
    Unprobed("sfa-any-k", SFA, "K has no limit", "the sections numbers and limits have many K",
             SPARSE),
    Unprobed("sfag-workspace", SFAG, "109 GB for K = 8192", "such a call takes 109 GB", SPARSE),
    Unprobed("sfag-rounding", SFAG, "P and dS are rounded half away from zero", ROUNDING, SPARSE),
    Unprobed("sfa-small-blocks", SFA, "sparse_block_size 2 and 4: a row is wrong",
             "the limits refuse these calls", ("A2", "A3")),
    Unprobed("sfag-deterministic", SFAG, "The function ignores its argument `deterministic`",
             ARGUMENT, SPARSE),
    Unprobed("kl-odd-cores", KL, "the deterministic kernel hangs if the number of AI cores is odd",
             "the device would hang", SPARSE),
    Unprobed("kl-rounding", KL, "P and dS are rounded half away from zero", ROUNDING, SPARSE),
    Unprobed("kl-deterministic", KL, "The function ignores its argument `deterministic`",
             ARGUMENT, SPARSE),
    Unprobed("kl-k-1024", KL, "The function takes multiples of 1024", LIMITS, SPARSE),
    Unprobed("fa-many-lengths", FA, "into arrays of 20000 elements without a check",
             "the host would write over its own memory", ATLAS),
    Unprobed("fa-sink", FA, "sink | A2, A3 in float16 and bfloat16", SINKS, ATLAS),
    Unprobed("fa-ropes", FA, "ropes | A2, A3 in TND and bfloat16", SINKS, ATLAS),
    Unprobed("fa-950-queries-without-keys", FA, "a sequence of queries without keys in layout TND",
             "the limits refuse these calls", P950),
    Unprobed("fa-950-dropout", FA, "the gradient applies dropout masks wrongly",
             "the limits refuse these calls", P950),
    Unprobed("fa-grad-padding", FA, "divide the padding rows among the", ALWAYS, ("A2", "A3")),
    Unprobed("fa-sink-and-ropes-950", FA, "both | 950 from CANN 9.1", SINKS, ("950",)),
    Unprobed("fa-sink-gradient", FA, "compute the gradient of a sink wrong",
             "this library never launches that function", ATLAS),
    Unprobed("fa-grad-tokens-wrap", FAG, "pre_tokens and next_tokens beyond 32 bits wrap around",
             LIMITS, ATLAS),
    Unprobed("pfa-int8-empty", PFA, "int8 with an empty key or value", LIMITS, PROMPT),
    Unprobed("pfa-mode-3-tokens", PFA, "mode 3 with next_tokens of -2147483647 or less", LIMITS,
             PROMPT),
    Unprobed("pfa-accepted", PFA, "A3, through V3 of the function", LIMITS, PROMPT),
    Unprobed("pfa-950-sizes", PFA, "D that is not a multiple of 16 in layout BNSD_BSND", LIMITS,
             P950),
    Unprobed("pfa-950-arguments", PFA, "full masks of two axes; a float16 quant_scale2",
             "the section numbers makes calls that have them", P950),
    Unprobed("pfa-950-one-query", PFA, "CANN documents that FusedInferAttentionScore ignores",
             "the launch says the same with lengths, so that either reading gives its results",
             P950),
    Unprobed("pfa-deprecation", PFA, "V1 carries the same notice", "a header is no call",
             PROMPT),
    Unprobed("fia-versions", FIA, "every call of V4 on Ascend 950", ENVIRONMENT, FUSED),
    Unprobed("fia-mask-axes", FIA, "full masks of two axes with ropes", ALWAYS, FUSED),
    Unprobed("fia-mask-axes-950", FIA, "full masks of two axes | 950", ALWAYS, P950),
    Unprobed("fia-one-head", FIA, "num_key_value_heads of 0", ALWAYS, P950),
    Unprobed("fia-950-accepted", FIA, "Ascend 950 only warns", "the limits refuse these calls",
             P950),
    Unprobed("fia-lse", FIA, "softmax_lse of a row without keys is infinity", ALWAYS, FUSED),
    Unprobed("fia-one-query", FIA, "query lengths are ignored for Sq = 1", ALWAYS, FUSED),
    Unprobed("fia-masked-rows", FIA, "a row that the *content* of a mask masks whole", ALWAYS,
             FUSED),
    Unprobed("fia-corrected-rows", FIA, "CANN documents this correction for D of 64 and 128",
             "the section numbers makes calls with such rows", FUSED),
    Unprobed("fia-copies", FIA, "Both functions take no strides", ALWAYS, FUSED),
    Unprobed("mla-versions", MLA, "every call, which the limits refuse", ENVIRONMENT, FUSED),
    Unprobed("mla-metadata", MLA, "metadata of other lengths or scalars", ALWAYS, ATLAS),
    Unprobed("mla-strides", MLA, "keys whose strides are not dense", ALWAYS, ATLAS),
    Unprobed("mla-grad-versions", MLAG, "the function takes its arguments in another order",
             ENVIRONMENT, FUSED),
    Unprobed("mla-grad-large-residual", MLAG, "a residual of cmp_ratio or more",
             "the device would read out of bounds", ATLAS),
    Unprobed("mla-grad-sink", MLAG, "a call without a sink reads one all the same",
             "the device would read out of bounds", ATLAS),
    Unprobed("mla-grad-workspace", MLAG, "a float32 copy of d_query", "CANN takes what it needs",
             ATLAS),
    Unprobed("mla-grad-rounding", MLAG, "P and dS are rounded half away from zero", ROUNDING,
             ATLAS),
    Unprobed("mla-grad-lengths", MLAG, "lengths in layout BSND", LIMITS, ATLAS),
    Unprobed("li-residual", LI, "reads a missing residual as 0", ALWAYS, ATLAS),
    Unprobed("li-padded-batches", LI, "the function takes no lengths in layout BSND", ALWAYS,
             ATLAS),
    Unprobed("klg-versions", KLG, "every call, which the limits refuse", ENVIRONMENT, FUSED),
    Unprobed("klg-residual", KLG, "a missing residual is read as 0", ALWAYS, ATLAS),
    Unprobed("klg-padding-rows", KLG, "layout TND with padding rows", ALWAYS, ATLAS),
    Unprobed("klg-few-indices", KLG, "a row with fewer than min(K, n) indices",
             "the device might read out of bounds", ATLAS),
    Unprobed("klg-target", KLG, "Its kernels compute y * sum(p) - p",
             "the section numbers has targets that add up to less than 1", ATLAS),
    Unprobed("klg-deterministic", KLG, "the function has no deterministic kernel", LIMITS, ATLAS),
    Unprobed("klg-padded-batches", KLG, "The function takes no lengths in layout BSND", ALWAYS,
             ATLAS),
    Unprobed("scatter-few-slots", SCATTER, "num_blocks * block_size < T, in every mode", LIMITS,
             ATLAS),
    Unprobed("scatter-large-heads", SCATTER, "Rope with heads of 1536 elements and more",
             "the device writes beyond a core's memory", ATLAS),
    Unprobed("scatter-dtypes", SCATTER, "Rope and Omni in other dtypes", LIMITS, ATLAS),
    Unprobed("scatter-empty", SCATTER, "N, D, T, B or block_size of 0", LIMITS),
    Unprobed("scatter-950-modes", SCATTER, "cache_mode and scatter_mode are ignored by 8.5 and 9.0",
             "the sections numbers and limits have the modes", ("950",)),
    Unprobed("scatter-accepted", SCATTER, "PA_NZ caches of five axes", LIMITS),
]  # fmt: skip
