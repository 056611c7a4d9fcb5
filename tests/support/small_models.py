"""Small random models of transformers, the same ones in every test."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

VOCABULARY = 97

_DENSE = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.2,
    "max_position_embeddings": 256, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None
}  # fmt: skip
_SPARSE = {
    **_DENSE, "num_hidden_layers": 3, "num_key_value_heads": 4, "q_lora_rank": 48, "n_group": 1,
    "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 24, "v_head_dim": 20,
    "moe_intermediate_size": 32, "n_routed_experts": 4, "topk_group": 1, "index_topk": 12,
    "num_experts_per_tok": 2, "first_k_dense_replace": 2, "index_n_heads": 16, "index_head_dim": 32,
}  # fmt: skip
del _SPARSE["head_dim"]
# torch's grouped products of matrices, the default of the experts, take no float64.
_WITH_EXPERTS = {
    **_DENSE, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "sliding_window": 7, "experts_implementation": "batched_mm",
}  # fmt: skip

_SLIDING = {**_DENSE, "sliding_window": 7}
_SCALED = {**_SLIDING, "query_pre_attn_scalar": 16}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", _DENSE),
    "Qwen3": ("Qwen3ForCausalLM", _DENSE),
    "Mistral": ("MistralForCausalLM", _SLIDING),
    "Gemma2": ("Gemma2ForCausalLM", _SCALED),
    "Gemma3": ("Gemma3ForCausalLM", _SCALED),
    "Gemma4": ("Gemma4ForCausalLM", {
        **_SLIDING, "num_hidden_layers": 4, "num_kv_shared_layers": 2, "global_head_dim": 16,
        "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }),
    "GptOss": ("GptOssForCausalLM", {
        **_WITH_EXPERTS, "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }),
    "GraniteMoeSWA": ("GraniteMoeSWAForCausalLM", _WITH_EXPERTS),
    "Flint": ("FlintForCausalLM", {**_WITH_EXPERTS, "num_experts": 4}),
    "MiMo-V2-Flash": ("MiMoV2FlashForCausalLM", {
        **_WITH_EXPERTS, "n_routed_experts": 4, "head_dim": 24, "v_head_dim": 16,
    }),
    "DeepSeek-V4": ("DeepseekV4ForCausalLM", {
        **_WITH_EXPERTS, "num_key_value_heads": 1, "q_lora_rank": 32, "o_groups": 2,
        "o_lora_rank": 16, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 4,
        "n_routed_experts": 4,
    }),
    "DiffLlama": ("DiffLlamaForCausalLM", _DENSE),
    "PhiMoE": ("PhimoeForCausalLM", _WITH_EXPERTS),
    "Doge": ("DogeForCausalLM", {**_DENSE, "keep_window_size": 7}),
    "ImageGPT": ("ImageGPTForCausalImageModeling", {
        "vocab_size": VOCABULARY, "n_positions": 128, "n_embd": 64, "n_layer": 1, "n_head": 4}),
    "Inkling2": ("Inkling2ForCausalLM", _DENSE),
    "DeepSeek-V3.2": ("DeepseekV32ForCausalLM", _SPARSE),
    "A.X-K2": ("AXK2ForCausalLM", {**_SPARSE, "num_local_experts": 4, "gated_norm_rank": 8}),
    "HY-V4": ("HYV4ForCausalLM", _SPARSE),
    "GLM-MoE-DSA": ("GlmMoeDsaForCausalLM", {
        **_SPARSE, "indexer_types": ["full", "shared", "full"],
    }),
}  # fmt: skip
SPARSE = ["DeepSeek-V3.2", "GLM-MoE-DSA"]
# Enough heads that no indexer gives two keys the score 0, and one of them is selected.
SMALL_V4 = {
    "num_hidden_layers": 3, "index_n_heads": 16,
    "layer_types": [
        "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention",
    ],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
}  # fmt: skip


def make(name: str, attention: str = "eager", **changes: Any) -> nn.Module:
    kind, arguments = CONFIGS[name]
    model_class = getattr(transformers, kind)
    torch.manual_seed(0)
    config = model_class.config_class(**{**arguments, **changes}, attn_implementation=attention)
    return model_class(config).eval()


def tokens(batch: int = 2, length: int = 40) -> Tensor:
    """Some text."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(1, VOCABULARY, (batch, length), generator=generator)


def padding(side: str, batch: int = 2, length: int = 40) -> dict[str, Tensor]:
    """Pads 7 tokens of the first sequence, and none of the others."""
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[0, slice(7) if side == "left" else slice(-7, None)] = 0
    return {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}


def packing(batch: int = 2, lengths: tuple[int, ...] = (15, 1, 24), gap: int = 3) -> dict[str, Any]:
    """transformers looks for packed sequences when it makes no cache.

    A sequence ends where positions do not go on: the last begins with position `gap`.
    """
    positions = torch.cat([torch.arange(length) for length in lengths])
    positions[-lengths[-1] :] += gap
    return {"position_ids": positions.expand(batch, -1), "use_cache": False}


def targets(text: Tensor, valid: Tensor) -> Tensor:
    """Labels that no padding token has to predict: what it attends to is nobody's business."""
    predicted = valid.clone()
    predicted[:, 1:] &= valid[:, :-1]
    return text.masked_fill(~predicted, -100)


def generated(model: nn.Module, cache: str, padded: bool, **options: Any) -> Any:
    """The best tokens behind some text, with their logits, from a cache of the library's."""
    mask = {"attention_mask": padding("left")["attention_mask"]} if padded else {}
    return model.generate(
        tokens(), **mask, **options, cache_implementation=cache, do_sample=False,
        output_logits=True, return_dict_in_generate=True, disable_compile=True,
    )  # fmt: skip
