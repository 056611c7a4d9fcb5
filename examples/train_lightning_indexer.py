"""Train a lightning indexer as in DeepSeek Sparse Attention, on the Python standard library.

    python examples/train_lightning_indexer.py
    torchrun --nproc-per-node 2 examples/train_lightning_indexer.py --context-parallel 2

1. Dense warm-up: the language model attends to every earlier byte, while the indexer of each layer
   learns, from the KL loss, to score keys as the attention does.
2. Sparse training: attention sees only the indexer's top-k, and both keep learning.

Then measures on held-out files how much of the attention the indexer's k keys hold, and what
attending to nothing else costs the language model, compared with random keys, the most recent keys
and the best possible k keys. Writes metrics.json, curves.png and checkpoint.pt to the output
directory; `--resume` continues from the checkpoint and ends exactly where an uninterrupted run
would have. Two runs with the same options on the same machine are identical, too.

Under torchrun, `--context-parallel` ranks share every sequence, and `--data-parallel` such groups
share the batch. The losses are those of one process, but for the rounding of sums over the ranks.
Parameters are sharded (FSDP2), and the checkpoint is a folder that any number of ranks resumes
from.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ascend_attn_ops as ops
import torch
import torch.distributed as dist
from evaluate import evaluate
from npu import register_npu
from parallel import Parallel
from precision import add_dtype, autocast, choose_dtype
from python_corpus import load_corpus, sample_windows
from report import Progress, plot, summary_table
from sparse_lm import ModelConfig, SparseLM, select_all, select_by_indexer
from torch import Tensor
from training import check_recipe, checkpoints, learning_rate_factor, save, saved_recipe

# The sizes that the NPU's kernels are tiled for; the rest of ModelConfig is a free choice.
DEVICE_SHAPES = {
    "heads": 64, "latent_dim": 512, "rope_dim": 64, "index_heads": 32, "index_dim": 128,
    "top_k": 2048, "sequence_length": 4096,
}  # fmt: skip

# Options that do not change the numbers, or not by more than the order of sums.
NOT_IN_RECIPE = {
    "out", "resume", "checkpoint_every", "log_every", "context_parallel", "data_parallel",
}  # fmt: skip


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    run = parser.add_argument_group("run")
    run.add_argument("--out", type=Path, default=Path("out"), help="output directory")
    run.add_argument("--device", choices=["cpu", "npu"], default="cpu")
    run.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    run.add_argument("--checkpoint-every", type=int, default=100, metavar="STEPS")
    run.add_argument("--log-every", type=int, default=25, metavar="STEPS", help="if no terminal")
    run.add_argument(
        "--context-parallel", type=int, default=1, metavar="RANKS", help="that share a sequence"
    )
    run.add_argument(
        "--data-parallel", type=int, default=1, nargs="?", const=0, metavar="GROUPS",
        help="of such ranks, which share the batch; without a number, as many as there are",
    )  # fmt: skip
    train = parser.add_argument_group("training")
    train.add_argument("--seed", type=int, default=0)
    train.add_argument("--warmup-steps", type=int, default=250, help="steps of dense warm-up")
    train.add_argument("--sparse-steps", type=int, default=500, help="steps of sparse training")
    train.add_argument("--batch-size", type=int, default=2)
    train.add_argument("--sequence-length", type=int, default=512)
    train.add_argument("--learning-rate", type=float, default=1.5e-3, help="of the language model")
    train.add_argument("--indexer-learning-rate", type=float, default=3e-3)
    train.add_argument("--eval-windows", type=int, default=16, help="held-out sequences")
    add_dtype(train)
    model = parser.add_argument_group("model")
    for name, default in asdict(ModelConfig()).items():
        model.add_argument("--" + name.replace("_", "-"), type=int, default=default)
    model.add_argument(
        "--device-shapes",
        action="store_true",
        help="the sizes of the NPU's kernels, checked against its limits: "
        + ", ".join(f"{name} {size}" for name, size in DEVICE_SHAPES.items()),
    )
    # As defaults, so that explicit sizes take precedence.
    if parser.parse_known_args()[0].device_shapes:
        parser.set_defaults(**DEVICE_SHAPES)
    arguments = parser.parse_args()
    if arguments.top_k >= arguments.sequence_length:
        parser.error("--top-k must be less than --sequence-length: nothing would be sparse")
    saved = saved_recipe(arguments.out) if arguments.resume else {}
    arguments.dtype = choose_dtype(arguments, saved.get("dtype"))
    return arguments


def set_up_device(name: str) -> torch.device:
    if name == "npu":
        register_npu()
    # On the NPU, this also makes the operators sum their gradients in a fixed order, where its CANN
    # can: 8.5 cannot.
    torch.use_deterministic_algorithms(True, warn_only=True)
    return torch.device(name)


class Trainer:
    """Model, optimizer and history: the contents of a checkpoint."""

    def __init__(
        self, arguments: argparse.Namespace, device: torch.device, parallel: Parallel
    ) -> None:
        self.arguments, self.device, self.parallel = arguments, device, parallel
        fields = asdict(ModelConfig())
        self.config = ModelConfig(**{name: getattr(arguments, name) for name in fields})
        torch.manual_seed(arguments.seed)
        # Parameters are fp32; under autocast the model computes, and calls the operators, in dtype.
        self.model = SparseLM(self.config).to(device)
        parallel.shard_parameters(self.model)
        self.groups = self.model.parameter_groups()
        rates = (arguments.learning_rate, arguments.indexer_learning_rate)
        self.optimizer = torch.optim.AdamW(
            [
                {"params": group, "peak_lr": rate}
                for group, rate in zip(self.groups, rates, strict=True)
            ],
            betas=(0.9, 0.95),
            weight_decay=0.1,
        )
        self.total_steps = arguments.warmup_steps + arguments.sparse_steps
        self.history: dict[str, list[float]] = {"bits_per_byte": [], "kl": []}
        # Everything that changes the numbers; a checkpoint with another recipe cannot be resumed.
        self.recipe = {
            name: value
            for name, value in sorted(vars(arguments).items())
            if name not in NOT_IN_RECIPE
        }

    @property
    def step(self) -> int:
        return len(self.history["kl"])

    @property
    def phase(self) -> str:
        return "dense" if self.step < self.arguments.warmup_steps else "sparse"

    def train_step(self, text: Tensor) -> tuple[float, float]:
        select = select_all if self.phase == "dense" else select_by_indexer
        text = self.parallel.my_sequences(text).to(self.device)
        shards = self.parallel.shards(len(text), text.shape[1] - 1)
        with autocast(self.device, self.arguments.dtype):
            lm_loss, kl_loss = self.model(text, select, shards)
        # No parameter contributes to both losses, so adding them trades nothing off.
        (self.parallel.gradient_factor * (lm_loss + kl_loss)).backward()
        factor = learning_rate_factor(self.step, self.total_steps)  # across both phases
        for group in self.optimizer.param_groups:
            torch.nn.utils.clip_grad_norm_(group["params"], 1.0)
            group["lr"] = factor * group["peak_lr"]
        self.optimizer.step()
        self.optimizer.zero_grad()
        lm, kl = self.parallel.mean(lm_loss, kl_loss)
        bits_per_byte = lm / math.log(2)
        if not math.isfinite(bits_per_byte + kl):
            raise SystemExit(f"step {self.step + 1}: loss {bits_per_byte} bits/byte, KL {kl}")
        self.history["bits_per_byte"].append(bits_per_byte)
        self.history["kl"].append(kl)
        return bits_per_byte, kl

    def save(self) -> None:
        about = {"recipe": self.recipe, "history": self.history}
        out = self.arguments.out
        if self.parallel.distributed:
            self.parallel.save(out, self.step, self.model, self.optimizer, about)
            return
        tensors = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        save(about | tensors, out / "checkpoint.pt")

    def load(self) -> bool:
        """Continue from the checkpoint, if there is one."""
        out = self.arguments.out
        if self.parallel.distributed:
            folders = checkpoints(out)
            if not folders:
                return False
            about = json.loads((folders[-1] / "about.json").read_text())
            check_recipe(self.recipe, about["recipe"], folders[-1])
            self.parallel.load(folders[-1], self.model, self.optimizer)
            self.history = about["history"]
            return True
        path = out / "checkpoint.pt"
        if not path.exists():
            return False
        state = torch.load(path, map_location=self.device, weights_only=True)
        check_recipe(self.recipe, state["recipe"], path)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.history = state["history"]
        return True


def train(trainer: Trainer, text: Tensor) -> None:
    arguments, is_main = trainer.arguments, trainer.parallel.is_main
    if arguments.resume and trainer.load() and is_main:
        print(f"resumed at step {trainer.step}", flush=True)
    tokens_per_step = arguments.batch_size * arguments.sequence_length
    progress = Progress(trainer.step, trainer.total_steps, tokens_per_step, arguments.log_every)
    while trainer.step < trainer.total_steps:
        # Seeded by the step alone, so that resuming needs no generator state.
        seed = arguments.seed * 1_000_003 + trainer.step
        batch = sample_windows(text, arguments.batch_size, arguments.sequence_length + 1, seed)
        phase = trainer.phase
        losses = trainer.train_step(batch)
        if is_main:
            progress.update(phase, *losses)
        if trainer.step % arguments.checkpoint_every == 0 or trainer.step == trainer.total_steps:
            trainer.save()


def finish(trainer: Trainer, held_out_text: Tensor, start: float) -> None:
    """Evaluate, and write what came of it."""
    arguments, trained = trainer.arguments, time.perf_counter()
    parameters = trainer.parallel.whole(trainer.model)
    if not trainer.parallel.is_main:
        return
    model = trainer.model
    if trainer.parallel.distributed:
        model = SparseLM(trainer.config).to(trainer.device)
        model.load_state_dict(parameters)
        torch.save({"recipe": trainer.recipe, "model": parameters}, arguments.out / "checkpoint.pt")
    windows = sample_windows(
        held_out_text, arguments.eval_windows, arguments.sequence_length + 1, arguments.seed
    )
    print("evaluating on held-out text ...", flush=True)
    held_out = evaluate(model, windows.to(trainer.device), arguments.batch_size, arguments.dtype)
    metrics: dict[str, Any] = {
        **trainer.recipe,
        "held_out": held_out,
        "history": trainer.history,
        # For this process: the only entry that differs between two identical runs.
        "seconds": {"training": trained - start, "evaluation": time.perf_counter() - trained},
    }
    (arguments.out / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n")
    plot(metrics, arguments.out / "curves.png")
    print(f"\n{summary_table(metrics)}\n")
    print(f"{time.perf_counter() - start:.0f} s; see {arguments.out}/curves.png and metrics.json")


def main() -> None:
    arguments = parse_arguments()
    device = set_up_device(arguments.device)
    parallel = Parallel(arguments.context_parallel, arguments.data_parallel, arguments.device)
    if arguments.batch_size % parallel.data:
        raise SystemExit(f"--batch-size: expected a multiple of --data-parallel, {parallel.data}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    train_text, held_out_text = load_corpus()
    if parallel.is_main:
        print(
            f"text: {len(train_text):,} bytes to train on, {len(held_out_text):,} held out; "
            f"threads: {torch.get_num_threads()}; {arguments.dtype}; output: {arguments.out}",
            flush=True,
        )
    start = time.perf_counter()
    # Laptop sizes are outside the NPU's limits; those of --device-shapes stay under its checks.
    limits = contextlib.nullcontext() if arguments.device_shapes else ops.limits(None)
    with limits:
        trainer = Trainer(arguments, device, parallel)
        train(trainer, train_text)
        finish(trainer, held_out_text, start)
    if parallel.distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
