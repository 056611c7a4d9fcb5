"""Compare the errors of int8 and of bfloat16 attention in a trained model.

    python examples/int8_prefill.py

Trains the language model of train_lightning_indexer.py with dense attention (or loads
`--checkpoint`), captures the attention inputs of each layer on held-out text, and compares
prompt_flash_attention with attention in float64: once on the bfloat16 tensors as they are, once on
the same tensors in int8. Then runs the whole model with each of them. Writes errors.png and
errors.md to the output directory. docs/tutorials/serving.md explains the errors ("Int8 prefill").
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import ascend_attn_ops as ops
import matplotlib
import torch
from ascend_attn_ops import LatentAttention
from npu import register_npu
from precision import add_dtype, autocast, dtype_of
from python_corpus import load_corpus, sample_windows
from sparse_lm import Block, ModelConfig, SparseLM
from torch import Tensor
from torch.nn import functional as F

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLORS = {"bfloat16": "#5b84b1", "int8": "#c8552b"}


class PrefillInputs(NamedTuple):
    """Attention inputs of N heads over S tokens; the three tensors are (B, N, S, D) bfloat16."""

    query: Tensor
    key: Tensor
    value: Tensor  # last D - Dv columns zero: the operator takes one head size
    scale: float
    value_dim: int


Attention = Callable[[PrefillInputs], Tensor]  # (B, N, S, D)


def prefill_inputs(layer: LatentAttention, x: Tensor) -> PrefillInputs:
    """Return the layer's attention inputs per head, for hidden states (B, S, hidden_size).

    The layer folds the heads' projections into query and output, so that all heads read one latent.
    Prefill unfolds them: a key and a value per head give the same scores and outputs.
    """
    inputs = layer.project(x)
    query = layer.query(x).unflatten(-1, (layer.heads, sum(layer.widths)))[..., : layer.widths[0]]
    latent = inputs.latent.squeeze(2)
    key = torch.einsum("bsl,ndl->bsnd", latent, layer.absorbed_key)
    value = torch.einsum("bsl,nld->bsnd", latent, layer.absorbed_value)
    key_rope = inputs.key_rope.expand(-1, -1, layer.heads, -1)
    padding = query.shape[-1] + key_rope.shape[-1] - value.shape[-1]
    tensors = (
        torch.cat([query, inputs.query_rope], dim=-1),
        torch.cat([key, key_rope], dim=-1),
        F.pad(value, (0, padding)),
    )
    query, key, value = (tensor.transpose(1, 2).bfloat16() for tensor in tensors)
    return PrefillInputs(query, key, value, layer.scale, layer.widths[0])


def _options(inputs: PrefillInputs) -> dict[str, Any]:
    return {
        "num_heads": inputs.query.shape[1],
        "layout": "BNSD",
        "sparse_mode": 3,
        "scale_value": inputs.scale,
    }


def attend_bfloat16(inputs: PrefillInputs) -> Tensor:
    return ops.prompt_flash_attention(inputs.query, inputs.key, inputs.value, **_options(inputs))


def attend_int8(inputs: PrefillInputs) -> Tensor:
    quantized = ops.quantize_attention_inputs(inputs.query, inputs.key, inputs.value)
    return ops.prompt_flash_attention(**quantized._asdict(), **_options(inputs))


def attend_float64(inputs: PrefillInputs) -> Tensor:
    """Attend on the CPU: no NPU has float64."""
    query, key, value = (x.cpu().double() for x in inputs[:3])
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=inputs.scale)


def attend_training(inputs: PrefillInputs) -> Tensor:
    query, key, value = inputs[:3]
    return ops.flash_attention_score(query, key, value, **_options(inputs))[0]


ATTENTIONS: dict[str, Attention] = {"bfloat16": attend_bfloat16, "int8": attend_int8}


def run(model: SparseLM, text: Tensor, attend: Attention) -> tuple[Tensor, list[PrefillInputs]]:
    """Return the bits per byte of (B, S + 1) bytes, and the attention inputs of each layer."""
    captured = []
    x = model.embed(text[:, :-1])
    for block in model.blocks:
        assert isinstance(block, Block)
        inputs = prefill_inputs(block.attention, block.attention_norm(x))
        captured.append(inputs)
        attended = attend(inputs)[..., : inputs.value_dim].float().to(x.device)
        x = x + block.attention.out(attended.transpose(1, 2).flatten(2))
        x = x + block.mlp(x)
    logits = model.head(model.norm(x)).float()
    loss = F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
    return loss / math.log(2), captured


def train(
    model: SparseLM, text: Tensor, steps: int, batch_size: int, length: int, dtype: str
) -> None:
    parameters, _ = model.parameter_groups()
    optimizer = torch.optim.AdamW(parameters, lr=1.5e-3, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.5e-3, steps, pct_start=0.05)
    device = parameters[0].device
    for step in range(steps):
        windows = sample_windows(text, batch_size, length + 1, seed=step).to(device)
        with autocast(device, dtype):
            bits, _ = run(model, windows, attend_training)
        bits.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if (step + 1) % 25 == 0:
            print(f"step {step + 1}/{steps}  {bits.item():.3f} bits/byte", flush=True)


def load(checkpoint: Path) -> SparseLM:
    """Load a model saved by this script or by train_lightning_indexer.py."""
    state = torch.load(checkpoint, map_location="cpu", weights_only=True)
    model = SparseLM(ModelConfig(**{name: state["recipe"][name] for name in asdict(ModelConfig())}))
    model.load_state_dict(state["model"])
    return model


class Errors(NamedTuple):
    """Errors of one layer: per element, relative to the RMS of the exact output; and the cosine."""

    relative: Tensor
    cosine: float

    @property
    def largest(self) -> float:
        return float(self.relative.abs().max())

    @property
    def rms(self) -> float:
        return float(self.relative.square().mean().sqrt())


def errors(inputs: PrefillInputs, attend: Attention) -> Errors:
    exact = attend_float64(inputs)[..., : inputs.value_dim]
    actual = attend(inputs)[..., : inputs.value_dim].cpu().double()
    relative = (actual - exact) / exact.square().mean().sqrt()
    cosine = F.cosine_similarity(actual.flatten(), exact.flatten(), dim=0)
    return Errors(relative.flatten(), float(cosine))


@torch.no_grad()
def compare(model: SparseLM, text: Tensor) -> tuple[list[dict[str, Errors]], dict[str, float]]:
    """Return each layer's errors and the model's bits per byte; all but attention is float32."""
    exact_bits, captured = run(model, text, attend_float64)
    layers = [
        {name: errors(inputs, attend) for name, attend in ATTENTIONS.items()} for inputs in captured
    ]
    bits = {name: float(run(model, text, attend)[0]) for name, attend in ATTENTIONS.items()}
    return layers, {"float64": float(exact_bits), **bits}


def table(layers: list[dict[str, Errors]], bits: dict[str, float]) -> str:
    lines = [
        "| layer | inputs | RMS error | largest error | 1 - cosine |",
        "|---|---|---|---|---|",
    ]
    for index, layer in enumerate(layers):
        for name, error in layer.items():
            lines.append(
                f"| {index} | {name} | {error.rms:.2%} | {error.largest:.1%} | "
                f"{1 - error.cosine:.1e} |"
            )
    lines += ["", "| attention of the model | bits per byte | against float64 |", "|---|---|---|"]
    for name, value in bits.items():
        lines.append(f"| {name} | {value:.4f} | {value / bits['float64'] - 1:+.3%} |")
    return "\n".join(lines) + "\n"


def plot(layers: list[dict[str, Errors]], path: Path) -> None:
    """Plot a histogram of the element-wise errors, one panel per layer."""
    # Any: matplotlib types the keys as the literal names of all its settings.
    style: dict[Any, Any] = {"axes.spines.top": False, "axes.spines.right": False}
    bins = [10 ** (exponent / 20) for exponent in range(-100, 1)]
    with plt.rc_context(style):
        figure, panels = plt.subplots(
            1, len(layers), figsize=(5.5 * len(layers), 4), sharey=True, squeeze=False
        )
        for index, (axes, layer) in enumerate(zip(panels[0], layers, strict=True)):
            for name, error in layer.items():
                sizes = error.relative.abs()
                axes.hist(
                    sizes.numpy(),
                    bins=bins,
                    weights=torch.full_like(sizes, 1 / len(sizes)).numpy(),
                    color=COLORS[name],
                    alpha=0.65,
                    label=f"{name}: RMS {error.rms:.2%}",
                )
                axes.axvline(error.rms, color=COLORS[name], linestyle="--")
            axes.set_xscale("log")
            axes.margins(y=0.3)
            axes.set_title(f"layer {index}")
            axes.set_xlabel("|error| / RMS of the exact output")
            axes.legend(loc="upper right", frameon=False)
        panels[0][0].set_ylabel("share of elements")
        figure.suptitle("prompt_flash_attention against float64, on held-out text")
        figure.tight_layout()
        figure.savefig(path, dpi=110)
        plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("out/int8_prefill"))
    parser.add_argument(
        "--checkpoint", type=Path, help="of this script or of train_lightning_indexer.py"
    )
    parser.add_argument("--device", choices=["cpu", "npu"], default="cpu")
    parser.add_argument("--steps", type=int, default=600, help="of training")
    parser.add_argument("--batch-size", type=int, default=2, help="of training")
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--windows", type=int, default=8, help="held-out sequences")
    add_dtype(parser)
    own = parser.parse_args()
    own.out.mkdir(parents=True, exist_ok=True)
    if own.device == "npu":
        register_npu()
    train_text, held_out_text = load_corpus()
    text = sample_windows(held_out_text, own.windows, own.sequence_length + 1, seed=0)
    text = text.to(own.device)
    # The sizes of this model are outside the NPU's limits.
    with ops.limits(None):
        if own.checkpoint:
            model = load(own.checkpoint).to(own.device)
        else:
            torch.manual_seed(0)
            model = SparseLM(ModelConfig()).to(own.device)
            tokens = own.batch_size * own.sequence_length
            dtype = own.dtype or dtype_of(own.device, tokens, ModelConfig.hidden_size)
            train(model, train_text, own.steps, own.batch_size, own.sequence_length, dtype)
            state = {"recipe": asdict(ModelConfig()), "model": model.state_dict()}
            torch.save(state, own.out / "checkpoint.pt")
        layers, bits = compare(model.eval(), text)
    result = table(layers, bits)
    (own.out / "errors.md").write_text(result)
    plot(layers, own.out / "errors.png")
    print(f"\n{result}\nsee {own.out}/errors.png and errors.md")


if __name__ == "__main__":
    main()
