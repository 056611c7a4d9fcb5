"""A slice of DeepSeek-V4's official checkpoints: their names, dtypes and ratios of sizes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from ascend_attn_ops.transformers import disable_dsa, enable_dsa  # noqa: E402
from ascend_attn_ops.transformers._layers import CACHE  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from transformers.cache_utils import Cache, DynamicCache, Fp8QuantizedLayer  # noqa: E402

pytestmark = pytest.mark.usefixtures("no_limits")

VOCABULARY, HIDDEN, EXPERTS, ACTIVE, STREAMS = 97, 256, 4, 2, 4
HEADS, HEAD_DIM, INDEX_HEADS, INDEX_DIM = 8, 128, 16, 128
RANK, GROUPS, GROUP_RANK, INNER = 128, 2, 128, 128
RATIOS = [0, 4, 128, 4]
HASH_LAYERS = 2
# As config.json has it, the older names included.
CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4",
    "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "moe_intermediate_size": INNER,
    "num_hidden_layers": len(RATIOS), "num_attention_heads": HEADS, "num_key_value_heads": 1,
    "head_dim": HEAD_DIM, "qk_rope_head_dim": HEAD_DIM // 8, "q_lora_rank": RANK,
    "o_groups": GROUPS, "o_lora_rank": GROUP_RANK, "index_n_heads": INDEX_HEADS,
    "index_head_dim": INDEX_DIM, "index_topk": 4, "sliding_window": 32, "n_routed_experts": EXPERTS,
    "n_shared_experts": 1, "num_experts_per_tok": ACTIVE, "num_hash_layers": HASH_LAYERS,
    "hc_mult": STREAMS, "compress_ratios": RATIOS, "compress_rope_theta": 160000,
    "rope_theta": 10000, "max_position_embeddings": 1048576, "num_nextn_predict_layers": 1,
    "rope_scaling": {
        "type": "yarn", "factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32,
        "beta_slow": 1,
    },
    "routed_scaling_factor": 1.5, "scoring_func": "sqrtsoftplus", "swiglu_limit": 10.0,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
QUANTIZATION = {
    "expert_dtype": "fp4",
    "quantization_config": {
        "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
}  # fmt: skip


def official() -> dict[str, Tensor]:
    """The tensors of a checkpoint, with its linear weights in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, Tensor] = {}

    def weight(name: str, *sizes: int) -> None:
        drawn = torch.randn(*sizes, generator=generator) * sizes[-1] ** -0.5
        tensors[f"{name}.weight"] = drawn.bfloat16()

    def norm(name: str, size: int) -> None:
        tensors[f"{name}.weight"] = (1 + 0.1 * torch.randn(size, generator=generator)).bfloat16()

    def precise(name: str, *sizes: int) -> None:
        tensors[name] = torch.randn(*sizes, generator=generator) * sizes[-1] ** -0.5

    def streams(name: str, outputs: int, scales: int) -> None:
        precise(f"{name}_fn", outputs, STREAMS * HIDDEN)
        precise(f"{name}_base", outputs)
        precise(f"{name}_scale", scales)

    def compressor(name: str, ratio: int, size: int) -> None:
        features = 2 * size if ratio == 4 else size
        precise(f"{name}.ape", ratio, features)
        weight(f"{name}.wkv", features, HIDDEN)
        weight(f"{name}.wgate", features, HIDDEN)
        norm(f"{name}.norm", size)

    def block(name: str, ratio: int, hashed: bool) -> None:
        attention = f"{name}.attn"
        weight(f"{attention}.wq_a", RANK, HIDDEN)
        norm(f"{attention}.q_norm", RANK)
        weight(f"{attention}.wq_b", HEADS * HEAD_DIM, RANK)
        weight(f"{attention}.wkv", HEAD_DIM, HIDDEN)
        norm(f"{attention}.kv_norm", HEAD_DIM)
        weight(f"{attention}.wo_a", GROUPS * GROUP_RANK, HEADS * HEAD_DIM // GROUPS)
        weight(f"{attention}.wo_b", HIDDEN, GROUPS * GROUP_RANK)
        precise(f"{attention}.attn_sink", HEADS)
        if ratio:
            compressor(f"{attention}.compressor", ratio, HEAD_DIM)
        if ratio == 4:
            compressor(f"{attention}.indexer.compressor", ratio, INDEX_DIM)
            weight(f"{attention}.indexer.wq_b", INDEX_HEADS * INDEX_DIM, RANK)
            weight(f"{attention}.indexer.weights_proj", INDEX_HEADS, HIDDEN)
        for part in ("attn", "ffn"):
            norm(f"{name}.{part}_norm", HIDDEN)
            streams(f"{name}.hc_{part}", (2 + STREAMS) * STREAMS, 3)
        for expert in [*(f"experts.{i}" for i in range(EXPERTS)), "shared_experts"]:
            weight(f"{name}.ffn.{expert}.w1", INNER, HIDDEN)
            weight(f"{name}.ffn.{expert}.w2", HIDDEN, INNER)
            weight(f"{name}.ffn.{expert}.w3", INNER, HIDDEN)
        weight(f"{name}.ffn.gate", EXPERTS, HIDDEN)
        if hashed:
            scores = torch.rand(VOCABULARY, EXPERTS, generator=generator)
            tensors[f"{name}.ffn.gate.tid2eid"] = scores.topk(ACTIVE).indices
        else:
            precise(f"{name}.ffn.gate.bias", EXPERTS)

    weight("embed", VOCABULARY, HIDDEN)
    weight("head", VOCABULARY, HIDDEN)
    norm("norm", HIDDEN)
    streams("hc_head", STREAMS, 1)
    for i, ratio in enumerate(RATIOS):
        block(f"layers.{i}", ratio, i < HASH_LAYERS)
    # The layers that predict further tokens, which transformers leaves out.
    block("mtp.0", 0, False)
    for name in ("e_proj", "h_proj"):
        weight(f"mtp.0.{name}", HIDDEN, HIDDEN)
    return tensors


FP8_WEIGHTS = re.compile(r"\.(wq_a|wq_b|wkv|wo_a|wo_b|w[123]|[eh]_proj)\.weight$")
FP4_VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def quantized(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors as they are released, and their values: experts in fp4, projections in fp8."""
    stored, values = dict(tensors), dict(tensors)
    for name, x in tensors.items():
        if FP8_WEIGHTS.search(name) is None or ".compressor." in name:
            continue
        rows, columns = x.shape
        scale_name = name.removesuffix("weight") + "scale"
        if ".experts." in name:
            blocks = x.float().view(rows, columns // 32, 32)
            scale = (blocks.abs().amax(-1, keepdim=True) / 6).log2().ceil().exp2()
            levels = torch.cat([FP4_VALUES, -FP4_VALUES])
            code = (blocks / scale).unsqueeze(-1).sub(levels).abs().argmin(-1)
            low, high = code.view(rows, columns // 2, 2).unbind(-1)
            stored[name] = (low | high << 4).to(torch.uint8).view(torch.int8)
            values[name] = (levels[code] * scale).view(rows, columns).bfloat16()
            stored[scale_name] = scale.squeeze(-1).to(torch.float8_e8m0fnu)
        else:
            blocks = x.float().view(rows // 128, 128, columns // 128, 128)
            scale = (blocks.abs().amax((1, 3), keepdim=True) / 448).log2().ceil().exp2()
            rounded = (blocks / scale).to(torch.float8_e4m3fn)
            stored[name] = rounded.view(rows, columns)
            values[name] = (rounded.float() * scale).view(rows, columns).bfloat16()
            stored[scale_name] = scale.squeeze(3).squeeze(1).to(torch.float8_e8m0fnu)
    return stored, values


def load(folder: Path, tensors: dict[str, Tensor], **config: Any) -> nn.Module:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="eager", experts_implementation="eager",
        output_loading_info=True,
    )  # fmt: skip
    assert not any(report.values()), report
    return model.eval()


def text(length: int = 280) -> Tensor:
    """Two keys of HCA layers, and more keys of CSA layers than an indexer selects."""
    return torch.randint(VOCABULARY, (1, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def check_logits(model: nn.Module) -> None:
    # In float32: eager code rounds scores to the dtype of the model.
    model.float()
    expected = model(text(), use_cache=False).logits
    enable_dsa(model)
    torch.testing.assert_close(model(text(), use_cache=False).logits, expected, rtol=0, atol=1e-4)
    disable_dsa(model)


def test_it_loads_and_has_the_logits_of_eager(tmp_path: Path) -> None:
    check_logits(load(tmp_path / "bf16", official()))


def test_released_in_fp8_and_fp4_it_loads_as_bfloat16(tmp_path: Path) -> None:
    """transformers dequantizes where it finds neither a GPU nor an XPU, as beside an NPU."""
    pytest.importorskip("accelerate", reason="transformers loads fp8 with accelerate")
    if torch.cuda.is_available() or (hasattr(torch, "xpu") and torch.xpu.is_available()):
        pytest.skip("transformers keeps fp8 on a GPU")
    stored, values = quantized(official())
    assert stored["layers.1.attn.indexer.wq_b.weight"].dtype == torch.float8_e4m3fn
    assert stored["layers.1.ffn.experts.0.w1.weight"].shape == (INNER, HIDDEN // 2)
    model = load(tmp_path / "fp8", stored, **QUANTIZATION)
    expected = dict(load(tmp_path / "bf16", values).named_parameters())
    for name, x in model.named_parameters():
        assert torch.equal(x.float(), expected[name].float()), name
    check_logits(model)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> nn.Module:
    return load(tmp_path_factory.mktemp("official") / "bf16", official())


@pytest.mark.parametrize("name", ["q_b_proj", "gate_proj", "scorer.weights_proj"])
def test_a_quantized_indexer_is_refused(model: nn.Module, name: str) -> None:
    projection = model.get_submodule(f"model.layers.3.self_attn.compressor.indexer.{name}")
    weight = projection.weight
    projection.weight = nn.Parameter(weight.to(torch.float8_e4m3fn), requires_grad=False)
    try:
        with pytest.raises(NotImplementedError, match=rf"{name}\.weight: .*float8_e4m3fn"):
            enable_dsa(model)
        assert not hasattr(model, "indexer_losses")
    finally:
        projection.weight = weight


@pytest.mark.parametrize("kind", ["DynamicLayer", "Fp8QuantizedLayer"])
def test_other_caches_are_refused(model: nn.Module, kind: str) -> None:
    """Quantized ones, and those that know nothing of the model."""
    layers = [Fp8QuantizedLayer() for _ in RATIOS]
    cache = DynamicCache() if kind == "DynamicLayer" else Cache(layers=layers)
    enable_dsa(model)
    with pytest.raises(NotImplementedError, match=f"layer 1's {CACHE}: .* got {kind}"):
        model(text(8), **{CACHE: cache})
    disable_dsa(model)
