"""Train a small DeepSeek-V4 of transformers and its indexers, on the Python standard library.

    python examples/train_deepseek_v4.py
    torchrun --nproc-per-node 2 examples/train_deepseek_v4.py

The layers attend to a window of keys; to all compressed keys (one for 16 tokens); or to those
compressed keys (one for 4 tokens) that an indexer selects. enable_dsa(model) computes them with
this library's operators, and lets the model's own backward train the indexers: they learn to give
keys the weights that the attention gives them.

Then transformers' own attention tells on held-out files how much of its weight on all compressed
keys the k selected ones hold: before the training, after it, and for k random keys. Writes
metrics.json, curves.png and checkpoint.pt to the output directory; `--resume` continues from the
checkpoint and ends where an uninterrupted run would have. Under torchrun the ranks share the batch.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import ascend_attn_ops as ops
import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
import transformers
from ascend_attn_ops.transformers import disable_dsa, enable_dsa
from matplotlib.ticker import PercentFormatter
from npu import register_npu
from precision import add_dtype, autocast, choose_dtype
from python_corpus import load_corpus, sample_windows
from report import Progress, draw_curve
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from training import check_recipe, learning_rate_factor, save, saved_recipe

WINDOW, CSA, HCA = (
    f"{kind}_attention" for kind in ("sliding", "compressed_sparse", "heavily_compressed")
)
# The sizes that the NPU's kernels take; the others are free.
DEVICE_SHAPES = {
    "head_dim": 512, "window": 128, "hca_ratio": 128, "top_k": 512, "index_dim": 128,
    "sequence_length": 4096,
}  # fmt: skip
# Options that do not change the numbers.
NOT_IN_RECIPE = {"out", "resume", "checkpoint_every", "log_every", "device"}

Model = Any
"""transformers.DeepseekV4ForCausalLM, whose annotations are incomplete."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("out/deepseek_v4"))
    parser.add_argument("--device", choices=["cpu", "npu"], default="cpu")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    parser.add_argument("--checkpoint-every", type=int, default=50, metavar="STEPS")
    parser.add_argument("--log-every", type=int, default=25, metavar="STEPS", help="if no terminal")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--eval-windows", type=int, default=8, help="held-out sequences")
    add_dtype(parser)
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--window", type=int, default=32, help="keys of the sliding window")
    parser.add_argument("--hca-ratio", type=int, default=16, help="tokens of a key in HCA layers")
    parser.add_argument("--index-heads", type=int, default=8)
    parser.add_argument("--index-dim", type=int, default=32)
    parser.add_argument("--top-k", type=int, default=16, help="compressed keys, each of 4 tokens")
    parser.add_argument(
        "--device-shapes",
        action="store_true",
        help="the sizes of the NPU's kernels, checked against its limits: "
        + ", ".join(f"{name} {size}" for name, size in DEVICE_SHAPES.items()),
    )
    # As defaults, so that explicit sizes take precedence.
    if parser.parse_known_args()[0].device_shapes:
        parser.set_defaults(**DEVICE_SHAPES)
    arguments = parser.parse_args()
    if arguments.top_k >= arguments.sequence_length // 4:
        parser.error(
            "--top-k must be less than a quarter of --sequence-length: nothing is selected"
        )
    saved = saved_recipe(arguments.out) if arguments.resume else {}
    arguments.dtype = choose_dtype(arguments, saved.get("dtype"))
    return arguments


def config_of(arguments: argparse.Namespace, top_k: int) -> transformers.DeepseekV4Config:
    hidden = arguments.hidden_size
    return transformers.DeepseekV4Config(
        vocab_size=256,
        hidden_size=hidden,
        moe_intermediate_size=2 * hidden,
        num_hidden_layers=4,
        layer_types=[WINDOW, CSA, HCA, CSA],
        compress_rates={CSA: 4, HCA: arguments.hca_ratio},
        num_attention_heads=arguments.heads,
        num_key_value_heads=1,
        head_dim=arguments.head_dim,
        q_lora_rank=hidden,
        o_groups=2,
        o_lora_rank=hidden // 2,
        sliding_window=arguments.window,
        index_n_heads=arguments.index_heads,
        index_head_dim=arguments.index_dim,
        index_topk=top_k,
        n_routed_experts=4,
        num_experts_per_tok=2,
        mlp_layer_types=["moe"] * 4,
        hc_mult=2,
        max_position_embeddings=arguments.sequence_length + 1,
        # Layers that keep the variance: with the 0.02 of wide models, these learn slower.
        initializer_range=hidden**-0.5,
        bos_token_id=None,
        eos_token_id=None,
        # One after the other: batched ones copy their weights for every token.
        experts_implementation="eager",
        attn_implementation="eager",
    )


class Trainer:
    """Model, optimizer and history: the contents of a checkpoint."""

    def __init__(self, arguments: argparse.Namespace, device: torch.device) -> None:
        self.arguments, self.device = arguments, device
        self.ranks = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        torch.manual_seed(arguments.seed)
        self.model: Model = transformers.DeepseekV4ForCausalLM(
            config_of(arguments, arguments.top_k)
        ).to(device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), betas=(0.9, 0.95), weight_decay=0.1
        )
        self.history: dict[str, list[float]] = {"bits_per_byte": [], "indexer_loss": []}
        self.recipe = {
            name: value for name, value in vars(arguments).items() if name not in NOT_IN_RECIPE
        }
        self.dtype = arguments.dtype
        self.checkpoint = arguments.out / "checkpoint.pt"

    @property
    def step(self) -> int:
        return len(self.history["bits_per_byte"])

    def train(self, text: Tensor) -> None:
        arguments = self.arguments
        enable_dsa(self.model)
        model = DistributedDataParallel(self.model) if self.ranks > 1 else self.model
        tokens = arguments.batch_size * arguments.sequence_length
        progress = Progress(self.step, arguments.steps, tokens, arguments.log_every)
        while self.step < arguments.steps:
            # Seeded by the step alone, so that resuming needs no generator state.
            seed = arguments.seed * 1_000_003 + self.step
            batch = sample_windows(text, arguments.batch_size, arguments.sequence_length, seed)
            losses = self.train_step(model, batch.chunk(self.ranks)[self.rank].to(self.device))
            if self.rank == 0:
                progress.update("train", *losses)
                if self.step % arguments.checkpoint_every == 0 or self.step == arguments.steps:
                    self.save()
        disable_dsa(self.model)

    def train_step(self, model: Model, batch: Tensor) -> tuple[float, float]:
        factor = learning_rate_factor(self.step, self.arguments.steps)
        self.optimizer.param_groups[0]["lr"] = factor * self.arguments.learning_rate
        with autocast(self.device, self.dtype):
            loss = model(batch, labels=batch, use_cache=False).loss
        # The indexers' losses are attached to it, and known behind its backward.
        loss.backward()
        of_indexers = torch.stack(list(self.model.indexer_losses().values())).mean()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        both = torch.stack([loss.detach() / math.log(2), of_indexers.to(loss.dtype)])
        if self.ranks > 1:
            dist.all_reduce(both)
        bits, indexer_loss = (both / self.ranks).tolist()
        self.history["bits_per_byte"].append(bits)
        self.history["indexer_loss"].append(indexer_loss)
        return bits, indexer_loss

    def save(self) -> None:
        tensors = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        save({"recipe": self.recipe, "history": self.history, **tensors}, self.checkpoint)

    def load(self) -> None:
        state = torch.load(self.checkpoint, map_location=self.device, weights_only=True)
        check_recipe(self.recipe, state["recipe"], self.checkpoint)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.history = state["history"]


@torch.no_grad()
def captured_mass(model: Model, windows: Tensor, arguments: argparse.Namespace) -> dict[str, float]:
    """The share of k keys in transformers' weights on all compressed keys, chosen in three ways.

    Over the queries with more than k of them; mean over sequences and layers with an indexer.
    """
    count, k = windows.shape[1] // 4, arguments.top_k
    # The same parameters, but every compressed key is selected: in the order of the scores.
    whole: Model = transformers.DeepseekV4ForCausalLM(config_of(arguments, count)).eval()
    whole.load_state_dict({name: x.cpu() for name, x in model.state_dict().items()})
    layers = {i for i, kind in enumerate(whole.config.layer_types) if kind == CSA}
    order: dict[int, Tensor] = {}
    for i in layers:
        whole.model.layers[i].self_attn.compressor.indexer.register_forward_hook(
            lambda module, inputs, output, i=i: order.update({i: output})
        )
    generator = torch.Generator().manual_seed(0)
    found: dict[str, list[Tensor]] = {"random": [], "indexer": [], "ideal": []}
    for window in windows.split(1):
        attentions = whole(window, output_attentions=True, use_cache=False).attentions
        for i in layers:
            weights = attentions[i].mean(1)[0, 4 * (k + 1) - 1 :, -count:]  # more than k visible
            visible = order[i][0, 4 * (k + 1) - 1 :]
            scores = torch.rand(weights.shape, generator=generator).masked_fill(weights == 0, -1)
            kept = {
                "random": weights.gather(-1, scores.topk(k).indices),
                "indexer": weights.gather(-1, visible[:, :k]),
                "ideal": weights.topk(k).values,
            }
            for name, x in kept.items():
                found[name].append((x.sum(-1) / weights.sum(-1)).mean())
    return {name: float(torch.stack(shares).mean()) for name, shares in found.items()}


def plot(metrics: dict[str, Any], path: Path) -> None:
    """The language model's loss, that of the indexers, and what they capture."""
    figure, axes = plt.subplots(1, 3, figsize=(14, 4.2))
    curves = (
        ("Language model", "training loss, bits per byte", "#333333"),
        ("Indexers against the attention", "training loss, nats per token", "#c8552b"),
    )
    for axis, (title, unit, color), curve in zip(
        axes[:2], curves, metrics["history"].values(), strict=True
    ):
        draw_curve(axis, curve, color)
        axis.set(title=title, ylabel=unit, ylim=(0, 1.05 * max(curve)))
    before, after = metrics["captured_mass"]["before"], metrics["captured_mass"]["after"]
    bars = {
        "random": after["random"], "indexers,\nuntrained": before["indexer"],
        "indexers,\ntrained": after["indexer"], "best": after["ideal"],
    }  # fmt: skip
    drawn = axes[2].bar(list(bars), list(bars.values()), color="#5b84b1")
    axes[2].bar_label(drawn, [f"{value:.1%}" for value in bars.values()])
    axes[2].set(
        title=f"Weight on {metrics['top_k']} compressed keys", xlabel="how they are selected",
        ylabel="share of all compressed keys' weight",
        ylim=(0, 1.2 * max(bars.values())),
    )  # fmt: skip
    axes[2].yaxis.set_major_formatter(PercentFormatter(1.0))
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    arguments = parse_arguments()
    if arguments.device == "npu":
        register_npu()
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("cpu:gloo,npu:hccl" if arguments.device == "npu" else "gloo")
        if arguments.device == "npu":
            torch.get_device_module("npu").set_device(int(os.environ["LOCAL_RANK"]))
    arguments.out.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    text, held_out = load_corpus()
    windows = sample_windows(held_out, arguments.eval_windows, arguments.sequence_length, 0)
    # Laptop sizes are outside the NPU's limits; those of --device-shapes stay under its checks.
    with contextlib.nullcontext() if arguments.device_shapes else ops.limits(None):
        trainer = Trainer(arguments, torch.device(arguments.device))
        before = captured_mass(trainer.model, windows, arguments) if trainer.rank == 0 else {}
        if arguments.resume and trainer.checkpoint.exists():
            trainer.load()
            print(f"resumed at step {trainer.step}", flush=True)
        trainer.train(text)
    if trainer.rank == 0:
        after = captured_mass(trainer.model, windows, arguments)
        metrics = {
            **trainer.recipe,
            "history": trainer.history,
            "captured_mass": {"before": before, "after": after},
            "seconds": time.perf_counter() - start,
        }
        metrics_path = arguments.out / "metrics.json"
        metrics_path.write_text(json.dumps(metrics, indent=1, default=str) + "\n")
        plot(metrics, arguments.out / "curves.png")
        print(
            f"weight on {arguments.top_k} compressed keys of held-out text: random "
            f"{after['random']:.1%}, indexer {before['indexer']:.1%} before and "
            f"{after['indexer']:.1%} after training, ideal {after['ideal']:.1%}\n"
            f"{metrics['seconds']:.0f} s; see {arguments.out}/curves.png and metrics.json"
        )
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
