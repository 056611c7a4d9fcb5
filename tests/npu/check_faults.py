"""Faults of the simulated device, and the line of `check` that must notice each."""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import cann_simulator
import torch
from ascend_attn_ops.__main__ import main
from ascend_attn_ops.check import child, command, runner
from ascend_attn_ops.check.behaviour import CASES_OF_LENGTHS
from ascend_attn_ops.check.probe import Context, Probe
from ascend_attn_ops.check.results import Result
from ascend_attn_ops.check.samples import OPERATORS
from torch import Tensor

Planted = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class Fault:
    """In a function of CANN, and the line that must notice it: the first that has this pattern."""

    name: str
    function: str
    line: str
    plant: Planted


def tensors(function: str, **changes: Callable[[Tensor], object]) -> Planted:
    return lambda: cann_simulator.altered(function, tensors=changes)


def numbers(function: str, **changes: Callable[[float], float]) -> Planted:
    return lambda: cann_simulator.altered(function, numbers=changes)


def status(function: str, phase: int, code: int) -> Planted:
    return lambda: cann_simulator.fail(function, phase, code, "planted", times=1000)


# Changes of a tensor.
def one_wrong(x: Tensor) -> None:
    x.view(-1)[x.numel() // 2] += 1


def scaled(x: Tensor) -> None:
    x *= 1.05


def heads_exchanged(x: Tensor) -> None:
    x.copy_(x.flip(1).clone())


def rows_moved(x: Tensor) -> None:
    x.copy_(x.roll(1, -2).clone())


def row_of_nan(x: Tensor) -> None:
    x[..., -1, :] = torch.nan


def row_unwritten(x: Tensor) -> None:
    x[..., 0, :] = 0


def nothing_written(x: Tensor) -> None:
    x.zero_()


def added_twice(x: Tensor) -> None:
    x[..., 0, :] *= 2


def infinite(x: Tensor) -> None:
    x.view(-1)[0] = torch.inf


def last_element(x: Tensor) -> None:
    x.view(-1)[-1] = 0.75


def slightly_off(x: Tensor) -> None:
    x *= 1.001


class Exchanged:
    """The statistics: the second of two tensors gets the first, and the reverse."""

    def __init__(self) -> None:
        self.first: Tensor | None = None

    def __call__(self, x: Tensor) -> None:
        if self.first is None:
            self.first = x
        else:
            both = self.first.clone(), x.clone()
            self.first.copy_(both[1])
            x.copy_(both[0])
            self.first = None


class Unsteady:
    """The last bits of a sum, which differ from call to call."""

    def __init__(self) -> None:
        self.calls = itertools.count()

    def __call__(self, x: Tensor) -> None:
        if next(self.calls) % 2:
            x.copy_(torch.where(x == 0, x, x * (1 + 2 * torch.finfo(x.dtype).eps)))


def kept(name: str) -> Callable[[float], float]:
    """Returns a change of the lengths of an update's keys into those of the capture."""
    captured, updated = (OPERATORS[name].make(x, torch.float16) for x in CASES_OF_LENGTHS[name])
    lengths = [x.options["actual_seq_lengths_key"] for x in (updated, captured)]
    return dict(zip(*lengths, strict=True)).__getitem__


def next_key(x: Tensor) -> None:
    x.copy_(torch.where(x >= 0, x + 1, x))


def key_twice(x: Tensor) -> None:
    x[..., 1] = x[..., 0]


def no_padding(x: Tensor) -> None:
    x.clamp_(min=0)


def ascending(x: Tensor) -> None:
    x.copy_(x.flip(-1).clone())


FA, FAG = "aclnnFlashAttentionScoreV2", "aclnnFlashAttentionScoreGradV2"
PACK, PACKG = "aclnnFlashAttentionVarLenScoreV2", "aclnnFlashAttentionUnpaddingScoreGradV2"
LI, LIG = "aclnnLightningIndexer", "aclnnLightningIndexerGrad"
SFA, SFAG = "aclnnSparseFlashAttention", "aclnnSparseFlashAttentionGrad"
KL = "aclnnSparseLightningIndexerGradKLLoss"
PFA, SCATTER, UPDATE = (
    "aclnnPromptFlashAttentionV3", "aclnnScatterPaKvCache", "aclnnAttentionUpdate"
)  # fmt: skip
MLA, MLAG = "aclnnSparseFlashMla", "aclnnSparseFlashMlaGrad"
LIV2, KLG = "aclnnLightningIndexerV2", "aclnnSparseLightningIndexerKLLossGrad"
FUSED, FIA = "aclnnFusedInferAttentionScoreV4", "aclnnFusedInferAttentionScoreV5"

# Lines of the section `numbers`, all in bfloat16 or float16.
LINE_FA = "numbers/flash_attention_score-BNSD-*bfloat16"
LINE_FAG = "numbers/flash_attention_score_grad-BNSD-*bfloat16"
LINE_PACK = "numbers/flash_attention_score-TND-*bfloat16"
LINE_PACKG = "numbers/flash_attention_score_grad-TND-*bfloat16"
LINE_LI = "numbers/lightning_indexer-*K1024*bfloat16"
LINE_LIG = "numbers/lightning_indexer_grad-*K1024*bfloat16"
LINE_SFA = "numbers/sparse_flash_attention-*K1024*bfloat16"
LINE_SFAG = "numbers/sparse_flash_attention_grad-*K1024*bfloat16"
LINE_KL = "numbers/sparse_lightning_indexer_grad_kl_loss-*K1024*bfloat16"
LINE_MLA = "numbers/sparse_flash_mla-*K512*bfloat16"
LINE_MLAG = "numbers/sparse_flash_mla_grad-*K512*bfloat16"
LINE_LIV2 = "numbers/lightning_indexer-*ratio4*bfloat16"
LINE_KLG = "numbers/sparse_lightning_indexer_kl_loss_grad-*K512*bfloat16"
LINE_FUSED = "numbers/fused_infer_attention_score-*lse-*bfloat16"
LINE_PFA = "numbers/prompt_flash_attention-*float16"
LINE_SCATTER = "numbers/scatter_pa_kv_cache_-*bfloat16"
LINE_UPDATE = "numbers/attention_update-*bfloat16"
AUTOGRAD = "numbers/{}-*-through-autograd-bfloat16"

FAULTS = [
    Fault("one wrong element", FA, LINE_FA, tensors(FA, attentionOutOut=one_wrong)),
    Fault("an output 5% too large", FA, LINE_FA, tensors(FA, attentionOutOut=scaled)),
    Fault("heads exchanged", FA, LINE_FA, tensors(FA, attentionOutOut=heads_exchanged)),
    Fault("rows moved by one", FA, LINE_FA, tensors(FA, attentionOutOut=rows_moved)),
    Fault("a row of NaN", FA, LINE_FA, tensors(FA, attentionOutOut=row_of_nan)),
    Fault("a row left unwritten", FA, LINE_FA, tensors(FA, attentionOutOut=row_unwritten)),
    Fault("nothing written", FA, LINE_FA, tensors(FA, attentionOutOut=nothing_written)),
    Fault("statistics exchanged", FA, LINE_FA,
          (lambda both: tensors(FA, softmaxMaxOut=both, softmaxSumOut=both))(Exchanged())),
    Fault("a sum 0.1% off", FA, LINE_FA, tensors(FA, softmaxSumOut=slightly_off)),
    Fault("a maximum of infinity", FA, LINE_FA, tensors(FA, softmaxMaxOut=infinite)),
    Fault("another scale", FA, LINE_FA, numbers(FA, scaleValue=lambda x: 1.1 * x)),
    Fault("the band one key later", FA, "numbers/flash_attention_score-*mode4*bfloat16",
          numbers(FA, nextTokens=lambda x: x + 1)),
    Fault("the band one key earlier", FA, "numbers/flash_attention_score-*mode4*bfloat16",
          numbers(FA, preTokens=lambda x: x - 1)),
    Fault("causal aligned at the other end", FA, "numbers/flash_attention_score-*mode2*bfloat16",
          numbers(FA, sparseMode=lambda x: 3 if x == 2 else x)),
    Fault("a bias scaled as none should be", FA, "numbers/flash_attention_score-*pse1*bfloat16",
          numbers(FA, pseType=lambda x: 0)),
    Fault("a gradient of one key", FAG, LINE_FAG, tensors(FAG, dkOut=added_twice)),
    Fault("a gradient of NaN", FAG, LINE_FAG, tensors(FAG, dvOut=row_of_nan)),
    Fault("a gradient without its scale", FAG, LINE_FAG, tensors(FAG, dqOut=scaled)),
    Fault("a gradient through autograd", FAG, AUTOGRAD.format("flash_attention_score-BNSD"),
          tensors(FAG, dqOut=rows_moved)),
    Fault("a row of a pack", PACK, LINE_PACK, tensors(PACK, attentionOutOut=row_unwritten)),
    Fault("lengths of a pack off by one", PACK, LINE_PACK,
          numbers(PACK, actualSeqKvLenOptional=lambda x: max(0, x - 1))),
    Fault("a gradient of a pack", PACKG, LINE_PACKG, tensors(PACKG, dkOut=heads_exchanged)),
    Fault("the next key selected", LI, LINE_LI, tensors(LI, sparseIndicesOut=next_key)),
    Fault("a key selected twice", LI, LINE_LI, tensors(LI, sparseIndicesOut=key_twice)),
    Fault("padding that is no -1", LI, LINE_LI, tensors(LI, sparseIndicesOut=no_padding)),
    Fault("values in ascending order", LI, LINE_LI, tensors(LI, sparseValuesOut=ascending)),
    Fault("the causal edge lost", LI, LINE_LI, numbers(LI, sparseMode=lambda x: 0)),
    Fault("a gradient of the indexer's query", LIG, LINE_LIG, tensors(LIG, dqOut=scaled)),
    Fault("a gradient of the indexer's key", LIG, LINE_LIG, tensors(LIG, dkOut=nothing_written)),
    Fault("a gradient of the weights", LIG, LINE_LIG, tensors(LIG, dweightsOut=nothing_written)),
    Fault("sparse attention of other heads", SFA, LINE_SFA,
          tensors(SFA, attentionOut=lambda x: x.copy_(x.roll(1, -2).clone()))),
    Fault("sparse statistics exchanged", SFA, LINE_SFA,
          (lambda both: tensors(SFA, softmaxMax=both, softmaxSum=both))(Exchanged())),
    Fault("sparse attention with another scale", SFA, LINE_SFA,
          numbers(SFA, scaleValue=lambda x: 1.1 * x)),
    Fault("a sparse gradient of the query", SFAG, LINE_SFAG,
          tensors(SFAG, dQueryOut=row_unwritten)),
    Fault("a sparse gradient of the key", SFAG, LINE_SFAG, tensors(SFAG, dKeyOut=nothing_written)),
    Fault("a gradient of the ropes", SFAG, LINE_SFAG,
          tensors(SFAG, dQueryRopeOutOptional=nothing_written)),
    Fault("a sparse gradient through autograd", SFAG,
          AUTOGRAD.format("sparse_flash_attention-*K1024"), tensors(SFAG, dQueryOut=infinite)),
    Fault("another loss", KL, LINE_KL, tensors(KL, loss=scaled)),
    Fault("the loss's gradient of the key", KL, LINE_KL, tensors(KL, dKeyIndex=nothing_written)),
    Fault("the loss's gradient of the weights", KL, LINE_KL, tensors(KL, dWeights=nothing_written)),
    Fault("compressed keys with another scale", MLA, LINE_MLA,
          numbers(MLA, softmaxScale=lambda x: 1.1 * x)),
    Fault("a row beside compressed keys left unwritten", MLA, LINE_MLA,
          tensors(MLA, attnOutOut=row_unwritten)),
    Fault("the log-sum-exp of compressed keys", MLA, LINE_MLA,
          tensors(MLA, softmaxLseOutOptional=one_wrong)),
    Fault("a gradient of compressed keys", MLAG, LINE_MLAG,
          tensors(MLAG, dCmpKvOutOptional=nothing_written)),
    Fault("a gradient of the sink", MLAG, LINE_MLAG, tensors(MLAG, dSinksOutOptional=scaled)),
    Fault("the target of an indexer", MLAG, LINE_MLAG,
          tensors(MLAG, cmpSoftmaxL1NormOptional=scaled)),
    Fault("a gradient of compressed keys through autograd", MLAG,
          AUTOGRAD.format("sparse_flash_mla"), tensors(MLAG, dQueryOut=infinite)),
    Fault("the next compressed key selected", LIV2, LINE_LIV2,
          tensors(LIV2, sparseIndices=next_key)),
    Fault("the causal edge of compressed keys lost", LIV2, LINE_LIV2,
          numbers(LIV2, maskMode=lambda x: 0)),
    Fault("a target's gradient of the key", KLG, LINE_KLG, tensors(KLG, dk=nothing_written)),
    Fault("a target's gradient of the weights", KLG, LINE_KLG, tensors(KLG, dw=nothing_written)),
    Fault("the prediction beside a target", KLG, LINE_KLG, tensors(KLG, softmaxOut=scaled)),
    Fault("a stricter rule of compressed keys", MLA, "limits/sparse_flash_mla-*-inside",
          status(MLA, 1, 161002)),
    Fault("compressed keys that a graph leaves out", MLA, "behaviour/graph-sparse_flash_mla",
          tensors(MLA, attnOutOut=nothing_written)),
    Fault("a prompt's row of NaN", PFA, LINE_PFA, tensors(PFA, attentionOut=row_of_nan)),
    Fault("a prompt's row left unwritten", PFA, LINE_PFA,
          tensors(PFA, attentionOut=row_unwritten)),
    Fault("a prompt's wrong element", PFA, LINE_PFA, tensors(PFA, attentionOut=last_element)),
    Fault("a prompt's heads exchanged", PFA, LINE_PFA, tensors(PFA, attentionOut=heads_exchanged)),
    Fault("a prompt with another scale", PFA, LINE_PFA,
          numbers(PFA, scaleValue=lambda x: 1.5 * x)),
    Fault("a prompt refused", PFA, LINE_PFA, status(PFA, 1, 161002)),
    Fault("a prompt that fails at its launch", PFA, LINE_PFA, status(PFA, 2, 361001)),
    Fault("a prompt's kernel that fails", PFA, LINE_PFA, status(PFA, 3, 507015)),
    Fault("a prompt that wants too much memory", PFA, LINE_PFA, status(PFA, 0, 0)),
    Fault("prompts that differ from call to call", PFA, "behaviour/determinism-prompt*",
          (lambda change: tensors(PFA, attentionOut=change))(Unsteady())),
    Fault("a prompt that a graph leaves out", PFA, "behaviour/graph-prompt*",
          tensors(PFA, attentionOut=nothing_written)),
    Fault("a stricter rule of prompts", PFA, "limits/prompt*-inside", status(PFA, 1, 161002)),
    Fault("a cache written one slot later", SCATTER, LINE_SCATTER,
          tensors(SCATTER, keyCacheRef=lambda x: x.copy_(x.roll(1, 1).clone()))),
    Fault("a cache left as it was", SCATTER, LINE_SCATTER,
          tensors(SCATTER, valueCacheRef=nothing_written)),
    Fault("merged parts", UPDATE, LINE_UPDATE, tensors(UPDATE, out=scaled)),
    Fault("the lse of merged parts", UPDATE, LINE_UPDATE, tensors(UPDATE, lseOut=infinite)),
    *(
        Fault(f"refused, {function.removeprefix('aclnn')}", function, line,
              status(function, 1, 161002))
        for function, line in (
            (FA, LINE_FA), (FAG, LINE_FAG), (LI, LINE_LI), (SFA, LINE_SFA), (KL, LINE_KL),
            (SCATTER, LINE_SCATTER), (UPDATE, LINE_UPDATE),
        )
    ),
    Fault("a kernel that fails", FA, LINE_FA, status(FA, 3, 507015)),
    Fault("too much workspace", FA, LINE_FA, status(FA, 0, 0)),
    Fault("a rule that is stricter", SFA, "limits/sparse_flash_attention-*-inside",
          status(SFA, 1, 161002)),
    Fault("a wrong result just inside a limit", FA,
          "limits/flash_attention_score-query-D-*-inside", tensors(FA, attentionOutOut=scaled)),
    Fault("padding rows that are written", LI, "known facts/li-padding-rows",
          tensors(LI, sparseIndicesOut=lambda x: x[-2:].fill_(-1))),
    Fault("sums that differ from call to call", SFAG,
          "behaviour/determinism-sparse_flash_attention_grad",
          (lambda change: tensors(SFAG, dQueryOut=change))(Unsteady())),
    Fault("a replay of a graph that computes nothing", FA, "behaviour/graph-flash_attention_score",
          tensors(FA, attentionOutOut=nothing_written)),
    Fault("a graph that keeps its lengths", PACK, "behaviour/graph-lengths-flash_attention_score",
          numbers(PACK, actualSeqKvLenOptional=kept("flash_attention_score"))),
    Fault("a graph that keeps a prompt's lengths", PFA,
          "behaviour/graph-lengths-prompt_flash_attention",
          numbers(PFA, actualSeqLengthsKv=kept("prompt_flash_attention"))),
    Fault("an update that computes nothing", PACK, "behaviour/graph-lengths-flash_attention_score",
          tensors(PACK, attentionOutOut=nothing_written)),
    Fault("a wrong element of a prompt on Ascend 950", FIA, LINE_PFA,
          tensors(FIA, attentionOut=last_element)),
    Fault("a prompt on Ascend 950 that a graph leaves out", FIA, "behaviour/graph-prompt*",
          tensors(FIA, attentionOut=nothing_written)),
    Fault("a graph that keeps a prompt's lengths on Ascend 950", FIA,
          "behaviour/graph-lengths-prompt_flash_attention",
          numbers(FIA, actualSeqLengthsKvOptional=kept("prompt_flash_attention"))),
    Fault("a wrong element of fused inference", FUSED, LINE_FUSED,
          tensors(FUSED, attentionOut=last_element)),
    Fault("a wrong log-sum-exp of fused inference", FUSED, LINE_FUSED,
          tensors(FUSED, softmaxLse=one_wrong)),
    Fault("a graph that keeps the lengths of fused inference", FUSED,
          "behaviour/graph-lengths-fused_infer_attention_score",
          numbers(FUSED, actualSeqLengthsKvOptional=kept("fused_infer_attention_score"))),
    Fault("host code that refuses", FAG, "host code/flash_attention_score_grad-*",
          status(FAG, 1, 161001)),
    Fault("a pack of many sequences", PACK, "behaviour/1000 sequences",
          tensors(PACK, attentionOutOut=row_unwritten)),
]  # fmt: skip

# By product and pattern of lines: why no such line passes there without the fault.
WITHOUT_LINE = {
    "950": {
        "host code/*": "the known refusals of CANN's host code are those of Atlas A2 and A3",
    },
    "310P": {
        "numbers/attention_update-*": "the limits exclude `attention_update`",
        "behaviour/graph-lengths-*": "the limits exclude lengths of `prompt_flash_attention`",
    },
}


def crash(x: Tensor) -> None:
    os.abort()


def hang(x: Tensor) -> None:
    time.sleep(600)


# In a child of its own: by the name of the fault, what the line must say, and when a probe hangs.
FATAL = {
    "crash": (crash, "signal SIGABRT", 30),
    "hang": (hang, "no answer within 3 seconds", 3),
}


def first(pattern: str, probes: list[Probe], context: Context) -> Probe | None:
    """The first probe that is within the limits of the product, and passes."""
    for probe in probes:
        if fnmatchcase(probe.id, pattern) and child.run(probe, context).verdict == "pass":
            return probe
    return None


def survey() -> dict[str, Any]:
    """Plants one fault after another; the line, verdict and text of the probe that has run."""
    context = Context("npu:0")
    probes = list(child.probes_of(context))
    found: dict[str, Any] = {}
    by_line: dict[str, Probe | None] = {}
    for fault in FAULTS:
        launched = fault.function != PFA or context.product[0] != "950"
        if not context.has_aclnn(fault.function) or not launched:
            continue
        if fault.line not in by_line:
            by_line[fault.line] = first(fault.line, probes, context)
        probe = by_line[fault.line]
        if probe is None:
            found[fault.name] = None
            continue
        with fault.plant():
            result = child.run(probe, context)
        found[fault.name] = [result.id, result.verdict, result.text]
    return found


def fatal(name: str) -> list[str]:
    """Returns the result of a probe that ends its process, or does not come back."""
    with runner.Runner([sys.executable, __file__, name], FATAL[name][2]) as running:
        task = next(x for x in running.tasks() if fnmatchcase(x.id, LINE_PFA))
        result = running.run(task)
    return [result.id, result.verdict, result.text]


class InThisProcess:
    """In the place of check's Runner, for probes that neither crash nor hang."""

    def __init__(self, command: Sequence[str], hang: float) -> None:
        device, quick, memory, recorded = json.loads(command[-1])
        self._context = Context(device, quick, memory, recorded and Path(recorded))
        child.limit_memory(self._context)
        self._probes = {x.id: x for x in child.probes_of(self._context)}

    def __enter__(self) -> InThisProcess:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def tasks(self) -> list[runner.Task]:
        return [
            runner.Task(x.section, x.group, x.id, x.quick, x.danger, x.longest)
            for x in self._probes.values()
        ]

    def run(self, task: runner.Task) -> Result:
        return child.run(self._probes[task.id], self._context)


def check_here(*arguments: str) -> int:
    """`python -m ascend_attn_ops check`, without a process for the probes."""
    command.Runner = InThisProcess  # type: ignore[misc, assignment]
    return main(["check", *arguments])


if __name__ == "__main__":
    torch.set_num_threads(1)
    with cann_simulator.altered(PFA, tensors={"attentionOut": FATAL[sys.argv[1]][0]}):
        child.serve(Context("npu:0"))
