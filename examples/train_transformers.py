"""Train the indexers of a small DeepSeek-V3.2 with transformers.Trainer, on the standard library.

    python examples/train_transformers.py

Three phases, each a run of transformers.Trainer on the same text:

1. Pretraining: the model of transformers, as it is, with dense attention.
2. Dense warm-up: enable_dsa(model, dense_warmup=True). The model is frozen, and the indexers learn
   to score keys as the attention weighs them.
3. Sparse training: enable_dsa(model). Attention sees the top-k of the indexers; all learn.

Then the saved model is loaded by transformers alone, and measured on held-out files as in
train_lightning_indexer.py: how much of the attention the indexers' keys hold, and what attending to
nothing else costs, compared with other keys. Writes metrics.json, curves.png and the models to the
output directory; `--resume` goes on from the last checkpoint.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ascend_attn_ops as ops
import torch
import transformers
from ascend_attn_ops.transformers import disable_dsa, enable_dsa
from evaluate import SELECTIONS, captured_mass, mean, top_k
from npu import register_npu
from python_corpus import load_corpus, sample_windows
from report import Progress, plot, summary_table
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

PHASES = ("pretrain", "dense", "sparse")
# Options that do not change the numbers.
NOT_IN_RECIPE = {"device", "out", "resume", "checkpoint_every", "log_every"}

Model = Any
"""transformers.DeepseekV32ForCausalLM, whose annotations are incomplete."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("out/transformers"))
    parser.add_argument(
        "--device",
        choices=["cpu", "npu"],
        default="cpu",
        help="of training; the sizes are a laptop's",
    )
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    parser.add_argument("--checkpoint-every", type=int, default=100, metavar="STEPS")
    parser.add_argument("--log-every", type=int, default=25, metavar="STEPS", help="if no terminal")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pretrain-steps", type=int, default=600)
    parser.add_argument("--warmup-steps", type=int, default=150, help="steps of dense warm-up")
    parser.add_argument("--sparse-steps", type=int, default=250, help="steps of sparse training")
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--learning-rate", type=float, default=1.5e-3, help="of pretraining")
    parser.add_argument("--warmup-learning-rate", type=float, default=3e-3)
    parser.add_argument("--sparse-learning-rate", type=float, default=5e-4)
    parser.add_argument("--eval-windows", type=int, default=16, help="held-out sequences")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--latent-dim", type=int, default=512)
    parser.add_argument("--rope-dim", type=int, default=64)
    parser.add_argument("--index-heads", type=int, default=8)
    parser.add_argument("--index-dim", type=int, default=128)
    parser.add_argument("--top-k", type=int, default=64)
    arguments = parser.parse_args()
    if arguments.top_k >= arguments.sequence_length:
        parser.error("--top-k must be less than --sequence-length: nothing would be sparse")
    return arguments


def config_of(arguments: argparse.Namespace) -> transformers.DeepseekV32Config:
    return transformers.DeepseekV32Config(
        vocab_size=256,
        hidden_size=arguments.hidden_size,
        intermediate_size=4 * arguments.hidden_size,
        num_hidden_layers=arguments.layers,
        first_k_dense_replace=arguments.layers,  # no experts
        num_attention_heads=arguments.heads,
        num_key_value_heads=arguments.heads,
        q_lora_rank=arguments.hidden_size,
        kv_lora_rank=arguments.latent_dim,
        qk_nope_head_dim=arguments.head_dim,
        qk_rope_head_dim=arguments.rope_dim,
        v_head_dim=arguments.head_dim,
        index_n_heads=arguments.index_heads,
        index_head_dim=arguments.index_dim,
        # All keys, which makes the attention dense.
        index_topk=arguments.sequence_length,
        max_position_embeddings=arguments.sequence_length,
        # Layers that keep the variance: with the 0.02 of wide models, these learn slower.
        initializer_range=arguments.hidden_size**-0.5,
        bos_token_id=None,
        eos_token_id=None,
    )


class Windows(Dataset):
    """Windows of the text, the same ones for the same seed."""

    def __init__(self, text: Tensor, count: int, length: int, seed: int) -> None:
        self.windows = sample_windows(text, count, length, seed)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.windows[index], "labels": self.windows[index]}


class Trainer(transformers.Trainer):  # type: ignore[misc]
    """Logs the indexers' losses beside that of the model."""

    def log(self, logs: dict[str, float], *arguments: Any, **options: Any) -> None:
        losses: dict[int, Tensor] = getattr(self.model, "indexer_losses", dict)()
        if "loss" in logs and losses:
            logs["kl"] = mean(loss.item() for loss in losses.values())
        super().log(logs, *arguments, **options)


class ShowProgress(transformers.TrainerCallback):  # type: ignore[misc]
    def __init__(self, phase: str, tokens_per_step: int, every: int) -> None:
        self.phase, self.tokens_per_step, self.every = phase, tokens_per_step, every
        self.progress: Progress | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.progress = Progress(
            state.global_step, state.max_steps, self.tokens_per_step, self.every
        )

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, float], **others: Any
    ) -> None:
        if "loss" in logs and self.progress is not None:
            bits = logs["loss"] / math.log(2)
            self.progress.update(self.phase, bits, logs.get("kl"))


def train(
    model: Model, phase: str, steps: int, rate: float, text: Tensor, arguments: argparse.Namespace
) -> list[dict[str, float]]:
    """Train in one phase, and return the losses of every step."""
    out = arguments.out / phase
    seed = arguments.seed * 1_000 + PHASES.index(phase)
    trainer = Trainer(
        model,
        transformers.TrainingArguments(
            output_dir=str(out),
            max_steps=steps,
            per_device_train_batch_size=arguments.batch_size,
            learning_rate=rate,
            lr_scheduler_type="cosine",
            warmup_steps=steps // 20,
            weight_decay=0.1,
            adam_beta2=0.95,
            bf16=True,
            use_cpu=arguments.device == "cpu",
            seed=seed,
            logging_steps=1,
            save_steps=arguments.checkpoint_every,
            save_total_limit=1,
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=Windows(text, steps * arguments.batch_size, arguments.sequence_length, seed),
        callbacks=[
            ShowProgress(
                phase, arguments.batch_size * arguments.sequence_length, arguments.log_every
            )
        ],
    )
    # Its only work would be to print the logs once more.
    trainer.remove_callback(transformers.PrinterCallback)
    checkpoint = transformers.trainer_utils.get_last_checkpoint(str(out)) if out.exists() else None
    if checkpoint and arguments.resume:
        print(f"{phase}: resumed from {checkpoint}", flush=True)
    trainer.train(resume_from_checkpoint=checkpoint if arguments.resume else None)
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def run_phase(phase: str, text: Tensor, arguments: argparse.Namespace) -> list[dict[str, float]]:
    """Load what the phase before has saved, train, and save."""
    done = arguments.out / phase / "model"
    if arguments.resume and (done / "history.json").exists():
        history: list[dict[str, float]] = json.loads((done / "history.json").read_text())
        return history
    if phase == "pretrain":
        torch.manual_seed(arguments.seed)
        model: Model = transformers.DeepseekV32ForCausalLM(config_of(arguments))
        steps, rate = arguments.pretrain_steps, arguments.learning_rate
    else:
        before = arguments.out / PHASES[PHASES.index(phase) - 1] / "model"
        model = transformers.DeepseekV32ForCausalLM.from_pretrained(
            before, index_topk=arguments.top_k
        )
        enable_dsa(model, dense_warmup=phase == "dense")
        dense = (arguments.warmup_steps, arguments.warmup_learning_rate)
        sparse = (arguments.sparse_steps, arguments.sparse_learning_rate)
        steps, rate = dense if phase == "dense" else sparse
    history = train(model, phase, steps, rate, text, arguments)
    disable_dsa(model)
    model.save_pretrained(done)
    (done / "history.json").write_text(json.dumps(history))
    return history


@contextmanager
def selecting(model: Model, choose: Callable[[int, Tensor], Tensor]) -> Iterator[None]:
    """Let every layer attend to the keys (B, S, K) that `choose` makes of its indexer's."""
    hooks = [
        layer.self_attn.indexer.register_forward_hook(
            lambda module, inputs, own, layer=number: choose(layer, own)
        )
        for number, layer in enumerate(model.model.layers)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def selections_of(attention: Tensor, own: Tensor) -> dict[str, Tensor]:
    """The keys (B, S, 1, K) that are compared, for a layer's attention (B, S, S)."""
    length, k = attention.shape[-1], own.shape[-1]
    age = torch.arange(length)[:, None] - torch.arange(length)
    generator = torch.Generator().manual_seed(0)
    random = torch.rand(attention.shape, generator=generator)
    every = torch.arange(length, dtype=torch.int32).expand(attention.shape)
    return {
        "dense": every.unsqueeze(2),
        "ideal": top_k(attention, k),
        "indexer": own.unsqueeze(2),
        "recent": top_k((-age).float().expand(attention.shape), k),
        "random": top_k(random, k),
    }


@torch.no_grad()
def evaluate(model: Model, windows: Tensor, batch_size: int) -> dict[str, dict[str, float]]:
    """Compare selections of keys in a model of transformers: evaluate.py says how.

    The ideal keys are those of a dense pass, in all layers.
    """
    mass: dict[str, list[float]] = defaultdict(list)
    bits: dict[str, list[float]] = defaultdict(list)
    model.eval()
    for batch in windows.split(batch_size):
        text, targets = batch[:, :-1], batch[:, 1:]
        own: dict[int, Tensor] = {}

        def every_key(layer: int, indices: Tensor, own: dict[int, Tensor] = own) -> Tensor:
            own[layer] = indices
            length = indices.shape[1]
            return torch.arange(length, dtype=torch.int32).expand(*indices.shape[:2], length)

        with selecting(model, every_key):
            attentions = model(text, output_attentions=True).attentions
        layers = [selections_of(x.float().mean(1), own[i]) for i, x in enumerate(attentions)]
        for layer, attention in zip(layers, attentions, strict=True):
            for name, indices in layer.items():
                probabilities = attention.float().mean(1)
                k = layer["indexer"].shape[-1]
                mass[name].append(captured_mass(probabilities, indices, k))
        for name in SELECTIONS:

            def chosen(layer: int, indices: Tensor, name: str = name) -> Tensor:
                # Masks of transformers take no -1: keys behind the diagonal are masked anyway.
                other = layers[layer][name].squeeze(2)  # noqa: B023
                return indices if name == "indexer" else other.where(other >= 0, 0)

            with selecting(model, chosen):
                logits = model(text).logits
            loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
            bits[name] += [loss.item() / math.log(2)] * len(batch)
    return {
        "attention_mass": {name: mean(values) for name, values in mass.items()},
        "bits_per_byte": {name: mean(values) for name, values in bits.items()},
    }


def main() -> None:
    arguments = parse_arguments()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise SystemExit("expected one process: examples/train_lightning_indexer.py takes several")
    if arguments.device == "npu":
        register_npu()
    arguments.out.mkdir(parents=True, exist_ok=True)
    recipe = {name: value for name, value in vars(arguments).items() if name not in NOT_IN_RECIPE}
    path = arguments.out / "recipe.json"
    if arguments.resume and path.exists() and json.loads(path.read_text()) != recipe:
        raise SystemExit(f"--resume: {path} has other options than this run")
    path.write_text(json.dumps(recipe))
    # Its own progress bars are of files that take no time.
    transformers.utils.logging.disable_progress_bar()
    start = time.perf_counter()
    train_text, held_out_text = load_corpus()
    # Laptop sizes are outside the NPU's limits.
    with ops.limits(None):
        histories = {phase: run_phase(phase, train_text, arguments) for phase in PHASES}
    trained = time.perf_counter()
    print("evaluating on held-out text, in plain transformers ...", flush=True)
    model = transformers.DeepseekV32ForCausalLM.from_pretrained(
        arguments.out / "sparse" / "model", attn_implementation="eager"
    )
    windows = sample_windows(
        held_out_text, arguments.eval_windows, arguments.sequence_length + 1, arguments.seed
    )
    steps = histories["dense"] + histories["sparse"]
    metrics: dict[str, Any] = {
        **recipe,
        "held_out": evaluate(model, windows, arguments.batch_size),
        "pretraining": [entry["loss"] / math.log(2) for entry in histories["pretrain"]],
        "history": {
            "bits_per_byte": [entry["loss"] / math.log(2) for entry in steps],
            "kl": [entry["kl"] for entry in steps],
        },
        "seconds": {"training": trained - start, "evaluation": time.perf_counter() - trained},
    }
    (arguments.out / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n")
    plot(metrics, arguments.out / "curves.png")
    print(f"\n{summary_table(metrics)}\n")
    print(f"{time.perf_counter() - start:.0f} s; see {arguments.out}/curves.png and metrics.json")


if __name__ == "__main__":
    main()
