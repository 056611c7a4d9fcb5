"""The classes of parameter sets that this library accepts and CANN's checks refuse.

docs/device.md names each class and says why.
"""

from __future__ import annotations

from collections.abc import Callable

from device_rules.verdicts import ParameterSet


def without_heads(x: ParameterSet) -> bool:
    if "sparse_indices" not in x.arguments:
        return False
    shapes = [x.arguments[name]["shape"] for name in ("query", "sparse_indices")]
    return len(shapes[1]) == len(shapes[0]) - 1


def padded_pack(x: ParameterSet) -> bool:
    """Without the 0 that the launch adds."""
    for side in ("query", "key"):
        ends = x.arguments.get(f"actual_seq_lengths_{side}")
        if not ends or not 0 < ends[-1] < x.arguments[side]["shape"][0]:
            return False
    return bool(x.arguments["layout"] == "TND")


def of_int64(x: ParameterSet) -> bool:
    tensors = (given for given in x.arguments.values() if isinstance(given, dict))
    return any(given["dtype"] == "int64" for given in tensors)


def without_ropes(x: ParameterSet) -> bool:
    return x.arguments.get("query_rope") is None and x.arguments.get("key_rope") is None


def statistics_of_pages(x: ParameterSet) -> bool:
    paged = x.arguments.get("block_table") is not None
    return paged and x.arguments.get("return_softmax_lse", True)


# For each operator: the name of a class, as the documentation has it, and which sets belong to it.
ACCEPTED_HERE: dict[str, dict[str, Callable[[ParameterSet], bool]]] = {
    "lightning_indexer": {"indices and lengths of int64": of_int64},
    "lightning_indexer_grad": {"indices and lengths of int64": of_int64},
    "prompt_flash_attention": {
        "modes 2, 3 and 4 without a mask": lambda x: (
            x.arguments["sparse_mode"] in (2, 3, 4) and "atten_mask" not in x.arguments
        ),
    },
    "flash_attention_score": {"padded packs without a closing 0": padded_pack},
    "flash_attention_score_grad": {
        "tokens beyond 32 bits": lambda x: any(
            abs(x.arguments.get(name, 0)) >= 2**31 for name in ("pre_tokens", "next_tokens")
        ),
    },
    "sparse_flash_attention": {
        "indices without the axis of heads": without_heads, "lengths of int64": of_int64,
        "calls without ropes": without_ropes, "statistics of paged keys": statistics_of_pages,
    },
    "sparse_flash_attention_grad": {
        "indices without the axis of heads": without_heads,
        "lengths of int64": of_int64,
    },
    "sparse_lightning_indexer_grad_kl_loss": {
        "calls without ropes": without_ropes,
        "indices and lengths of int64": of_int64,
    },
    "scatter_pa_kv_cache": {"key without value": lambda x: "value" not in x.arguments},
}  # fmt: skip
