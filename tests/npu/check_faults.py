"""Faults of the simulated device, and the line of `check` that must notice each."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import cann_simulator
import torch
from ascend_attn_check import child, command, runner
from ascend_attn_check.__main__ import main
from ascend_attn_check.behaviour import CASES_OF_LENGTHS
from ascend_attn_check.probe import Context, Probe
from ascend_attn_check.results import Result
from ascend_attn_check.samples import OPERATORS
from torch import Tensor

Planted = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True)
class Fault:
    """In a function of CANN."""

    name: str
    function: str
    plant: Planted
    pattern: str = ""

    @property
    def line(self) -> str:
        """The line that must notice it: the first that has this pattern."""
        return self.pattern or LINES[self.function]


CHANGES: dict[str, Callable[[Tensor], object]] = {
    "one wrong": lambda x: x.view(-1)[x.numel() // 2].add_(1), "scaled": lambda x: x.mul_(1.05),
    "slightly off": lambda x: x.mul_(1.001),
    "heads exchanged": lambda x: x.copy_(x.flip(1).clone()),
    "rows moved": lambda x: x.copy_(x.roll(1, -2).clone()),
    "row of NaN": lambda x: x[..., -1, :].fill_(torch.nan),
    "row unwritten": lambda x: x[..., 0, :].zero_(), "unwritten": Tensor.zero_,
    "added twice": lambda x: x[..., 0, :].mul_(2),
    "infinite": lambda x: x.view(-1)[0].fill_(torch.inf),
    "last element": lambda x: x.view(-1)[-1].fill_(0.75),
    "next key": lambda x: x.copy_(torch.where(x >= 0, x + 1, x)),
    "key twice": lambda x: x[..., 1].copy_(x[..., 0]), "no padding": lambda x: x.clamp_(min=0),
    "ascending": lambda x: x.copy_(x.flip(-1).clone()),
}  # fmt: skip


def tensors(**changes: str | Callable[[Tensor], object]) -> Planted:
    """Changes of outputs, some by their name."""
    named = {name: CHANGES[x] if isinstance(x, str) else x for name, x in changes.items()}
    return lambda function: cann_simulator.altered(function, tensors=named)


def numbers(**changes: Callable[[float], float]) -> Planted:
    return lambda function: cann_simulator.altered(function, numbers=changes)


def status(phase: int, code: int) -> Planted:
    return lambda function: cann_simulator.fail(function, phase, code, "planted", times=1000)


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


def exchanged(*names: str) -> Planted:
    return tensors(**dict.fromkeys(names, Exchanged()))


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


FA, FAG = "aclnnFlashAttentionScoreV2", "aclnnFlashAttentionScoreGradV2"
PACK, PACKG = "aclnnFlashAttentionVarLenScoreV2", "aclnnFlashAttentionUnpaddingScoreGradV2"
LI, LIG = "aclnnLightningIndexer", "aclnnLightningIndexerGrad"
SFA, SFAG = "aclnnSparseFlashAttention", "aclnnSparseFlashAttentionGrad"
QLI, QSFA = "aclnnQuantLightningIndexer", "aclnnKvQuantSparseFlashAttention"
KL = "aclnnSparseLightningIndexerGradKLLoss"
PFA, SCATTER, UPDATE = (
    "aclnnPromptFlashAttentionV3", "aclnnScatterPaKvCache", "aclnnAttentionUpdate"
)  # fmt: skip
MLA, MLAG = "aclnnSparseFlashMla", "aclnnSparseFlashMlaGrad"
LIV2, KLG = "aclnnLightningIndexerV2", "aclnnSparseLightningIndexerKLLossGrad"
FUSED, FIA = "aclnnFusedInferAttentionScoreV4", "aclnnFusedInferAttentionScoreV5"

# By function, its line of the section `numbers`.
LINES = {
    FA: "numbers/flash_attention_score-BNSD-*bfloat16",
    FAG: "numbers/flash_attention_score_grad-BNSD-*bfloat16",
    PACK: "numbers/flash_attention_score-TND-*bfloat16",
    PACKG: "numbers/flash_attention_score_grad-TND-*bfloat16",
    LI: "numbers/lightning_indexer-*K1024*bfloat16",
    LIG: "numbers/lightning_indexer_grad-*K1024*bfloat16",
    SFA: "numbers/sparse_flash_attention-*K1024*bfloat16",
    SFAG: "numbers/sparse_flash_attention_grad-*K1024*bfloat16",
    QLI: "numbers/quant_lightning_indexer-*K1024*",
    QSFA: "numbers/kv_quant_sparse_flash_attention-*K1024*bfloat16",
    KL: "numbers/sparse_lightning_indexer_grad_kl_loss-*K1024*bfloat16",
    MLA: "numbers/sparse_flash_mla-*K512*bfloat16",
    MLAG: "numbers/sparse_flash_mla_grad-*K512*bfloat16",
    LIV2: "numbers/lightning_indexer-*ratio4*bfloat16",
    KLG: "numbers/sparse_lightning_indexer_kl_loss_grad-*K512*bfloat16",
    FUSED: "numbers/fused_infer_attention_score-*lse-*bfloat16",
    PFA: "numbers/prompt_flash_attention-*float16",
    SCATTER: "numbers/scatter_pa_kv_cache_-*bfloat16", UPDATE: "numbers/attention_update-*bfloat16",
    FIA: "numbers/prompt_flash_attention-*float16",
}  # fmt: skip
AUTOGRAD = "numbers/{}-*-through-autograd-bfloat16"

FAULTS = [
    Fault("one wrong element", FA, tensors(attentionOutOut="one wrong")),
    Fault("an output 5% too large", FA, tensors(attentionOutOut="scaled")),
    Fault("heads exchanged", FA, tensors(attentionOutOut="heads exchanged")),
    Fault("rows moved by one", FA, tensors(attentionOutOut="rows moved")),
    Fault("a row of NaN", FA, tensors(attentionOutOut="row of NaN")),
    Fault("a row left unwritten", FA, tensors(attentionOutOut="row unwritten")),
    Fault("nothing written", FA, tensors(attentionOutOut="unwritten")),
    Fault("statistics exchanged", FA, exchanged("softmaxMaxOut", "softmaxSumOut")),
    Fault("a sum 0.1% off", FA, tensors(softmaxSumOut="slightly off")),
    Fault("a maximum of infinity", FA, tensors(softmaxMaxOut="infinite")),
    Fault("another scale", FA, numbers(scaleValue=lambda x: 1.1 * x)),
    Fault("the band one key later", FA, numbers(nextTokens=lambda x: x + 1),
          "numbers/flash_attention_score-*mode4*bfloat16"),
    Fault("the band one key earlier", FA, numbers(preTokens=lambda x: x - 1),
          "numbers/flash_attention_score-*mode4*bfloat16"),
    Fault("causal aligned at the other end", FA, numbers(sparseMode=lambda x: 3 if x == 2 else x),
          "numbers/flash_attention_score-*mode2*bfloat16"),
    Fault("a bias scaled as none should be", FA, numbers(pseType=lambda x: 0),
          "numbers/flash_attention_score-*pse1*bfloat16"),
    Fault("a gradient of one key", FAG, tensors(dkOut="added twice")),
    Fault("a gradient of NaN", FAG, tensors(dvOut="row of NaN")),
    Fault("a gradient without its scale", FAG, tensors(dqOut="scaled")),
    Fault("a gradient through autograd", FAG, tensors(dqOut="rows moved"),
          AUTOGRAD.format("flash_attention_score-BNSD")),
    Fault("a row of a pack", PACK, tensors(attentionOutOut="row unwritten")),
    Fault("lengths of a pack off by one", PACK,
          numbers(actualSeqKvLenOptional=lambda x: max(0, x - 1))),
    Fault("a gradient of a pack", PACKG, tensors(dkOut="heads exchanged")),
    Fault("the next key selected", LI, tensors(sparseIndicesOut="next key")),
    Fault("a key selected twice", LI, tensors(sparseIndicesOut="key twice")),
    Fault("padding that is no -1", LI, tensors(sparseIndicesOut="no padding")),
    Fault("values in ascending order", LI, tensors(sparseValuesOut="ascending")),
    Fault("the causal edge lost", LI, numbers(sparseMode=lambda x: 0)),
    Fault("a gradient of the indexer's query", LIG, tensors(dqOut="scaled")),
    Fault("a gradient of the indexer's key", LIG, tensors(dkOut="unwritten")),
    Fault("a gradient of the weights", LIG, tensors(dweightsOut="unwritten")),
    Fault("sparse attention of other heads", SFA,
          tensors(attentionOut=lambda x: x.copy_(x.roll(1, -2).clone()))),
    Fault("sparse statistics exchanged", SFA, exchanged("softmaxMax", "softmaxSum")),
    Fault("sparse attention with another scale", SFA, numbers(scaleValue=lambda x: 1.1 * x)),
    Fault("a sparse gradient of the query", SFAG, tensors(dQueryOut="row unwritten")),
    Fault("a sparse gradient of the key", SFAG, tensors(dKeyOut="unwritten")),
    Fault("a gradient of the ropes", SFAG, tensors(dQueryRopeOutOptional="unwritten")),
    Fault("a sparse gradient through autograd", SFAG, tensors(dQueryOut="infinite"),
          AUTOGRAD.format("sparse_flash_attention-*K1024")),
    Fault("the next int8 key selected", QLI, tensors(sparseIndicesOut="next key")),
    Fault("the causal edge of int8 keys lost", QLI, numbers(sparseMode=lambda x: 0)),
    Fault("attention to int8 keys with another scale", QSFA, numbers(scaleValue=lambda x: 1.1 * x)),
    Fault("a row of attention to int8 keys left unwritten", QSFA,
          tensors(attentionOut="row unwritten")),
    Fault("another loss", KL, tensors(loss="scaled")),
    Fault("the loss's gradient of the key", KL, tensors(dKeyIndex="unwritten")),
    Fault("the loss's gradient of the weights", KL, tensors(dWeights="unwritten")),
    Fault("compressed keys with another scale", MLA, numbers(softmaxScale=lambda x: 1.1 * x)),
    Fault("a row beside compressed keys left unwritten", MLA, tensors(attnOutOut="row unwritten")),
    Fault("the log-sum-exp of compressed keys", MLA, tensors(softmaxLseOutOptional="one wrong")),
    Fault("a gradient of compressed keys", MLAG, tensors(dCmpKvOutOptional="unwritten")),
    Fault("a gradient of the sink", MLAG, tensors(dSinksOutOptional="scaled")),
    Fault("the target of an indexer", MLAG, tensors(cmpSoftmaxL1NormOptional="scaled")),
    Fault("a gradient of compressed keys through autograd", MLAG, tensors(dQueryOut="infinite"),
          AUTOGRAD.format("sparse_flash_mla")),
    Fault("the next compressed key selected", LIV2, tensors(sparseIndices="next key")),
    Fault("the causal edge of compressed keys lost", LIV2, numbers(maskMode=lambda x: 0)),
    Fault("a target's gradient of the key", KLG, tensors(dk="unwritten")),
    Fault("a target's gradient of the weights", KLG, tensors(dw="unwritten")),
    Fault("the prediction beside a target", KLG, tensors(softmaxOut="scaled")),
    Fault("a stricter rule of compressed keys", MLA, status(1, 161002),
          "limits/sparse_flash_mla-*-inside"),
    Fault("compressed keys that a graph leaves out", MLA, tensors(attnOutOut="unwritten"),
          "behaviour/graph-sparse_flash_mla"),
    Fault("a prompt's row of NaN", PFA, tensors(attentionOut="row of NaN")),
    Fault("a prompt's row left unwritten", PFA, tensors(attentionOut="row unwritten")),
    Fault("a prompt's wrong element", PFA, tensors(attentionOut="last element")),
    Fault("a prompt's heads exchanged", PFA, tensors(attentionOut="heads exchanged")),
    Fault("a prompt with another scale", PFA, numbers(scaleValue=lambda x: 1.5 * x)),
    Fault("a prompt refused", PFA, status(1, 161002)),
    Fault("a prompt that fails at its launch", PFA, status(2, 361001)),
    Fault("a prompt's kernel that fails", PFA, status(3, 507015)),
    Fault("a prompt that wants too much memory", PFA, status(0, 0)),
    Fault("prompts that differ from call to call", PFA, tensors(attentionOut=Unsteady()),
          "behaviour/determinism-prompt*"),
    Fault("a prompt that a graph leaves out", PFA, tensors(attentionOut="unwritten"),
          "behaviour/graph-prompt*"),
    Fault("a stricter rule of prompts", PFA, status(1, 161002), "limits/prompt*-inside"),
    Fault("a cache written one slot later", SCATTER,
          tensors(keyCacheRef=lambda x: x.copy_(x.roll(1, 1).clone()))),
    Fault("a cache left as it was", SCATTER, tensors(valueCacheRef="unwritten")),
    Fault("merged parts", UPDATE, tensors(out="scaled")),
    Fault("the lse of merged parts", UPDATE, tensors(lseOut="infinite")),
    *(
        Fault(f"refused, {function.removeprefix('aclnn')}", function, status(1, 161002))
        for function in (FA, FAG, LI, SFA, KL, SCATTER, UPDATE)
    ),
    Fault("a kernel that fails", FA, status(3, 507015)),
    Fault("too much workspace", FA, status(0, 0)),
    Fault("a rule that is stricter", SFA, status(1, 161002),
          "limits/sparse_flash_attention-*-inside"),
    Fault("a wrong result just inside a limit", FA, tensors(attentionOutOut="scaled"),
          "limits/flash_attention_score-query-D-*-inside"),
    Fault("padding rows that are written", LI, tensors(sparseIndicesOut=lambda x: x[-2:].fill_(-1)),
          "known facts/li-padding-rows"),
    Fault("sums that differ from call to call", SFAG, tensors(dQueryOut=Unsteady()),
          "behaviour/determinism-sparse_flash_attention_grad"),
    Fault("a replay of a graph that computes nothing", FA, tensors(attentionOutOut="unwritten"),
          "behaviour/graph-flash_attention_score"),
    Fault("a graph that keeps its lengths", PACK,
          numbers(actualSeqKvLenOptional=kept("flash_attention_score")),
          "behaviour/graph-lengths-flash_attention_score"),
    Fault("a graph that keeps a prompt's lengths", PFA,
          numbers(actualSeqLengthsKv=kept("prompt_flash_attention")),
          "behaviour/graph-lengths-prompt_flash_attention"),
    Fault("an update that computes nothing", PACK, tensors(attentionOutOut="unwritten"),
          "behaviour/graph-lengths-flash_attention_score"),
    Fault("a wrong element of a prompt on Ascend 950", FIA, tensors(attentionOut="last element")),
    Fault("a prompt on Ascend 950 that a graph leaves out", FIA,
          tensors(attentionOut="unwritten"), "behaviour/graph-prompt*"),
    Fault("a graph that keeps a prompt's lengths on Ascend 950", FIA,
          numbers(actualSeqLengthsKvOptional=kept("prompt_flash_attention")),
          "behaviour/graph-lengths-prompt_flash_attention"),
    Fault("a wrong element of fused inference", FUSED, tensors(attentionOut="last element")),
    Fault("a wrong log-sum-exp of fused inference", FUSED, tensors(softmaxLse="one wrong")),
    Fault("a graph that keeps the lengths of fused inference", FUSED,
          numbers(actualSeqLengthsKvOptional=kept("fused_infer_attention_score")),
          "behaviour/graph-lengths-fused_infer_attention_score"),
    Fault("host code that refuses", FAG, status(1, 161001),
          "host code/flash_attention_score_grad-*"),
    Fault("a pack of many sequences", PACK, tensors(attentionOutOut="row unwritten"),
          "behaviour/1000 sequences"),
]  # fmt: skip

# By product and pattern of lines: why no such line passes there without the fault.
WITHOUT_LINE = {
    "950": {
        "host code/*": "the known refusals of CANN's host code are those of Atlas A2 and A3",
        "numbers/quant_lightning_indexer-*": "the limits exclude int8 keys of the indexer",
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
FATAL = {"crash": (crash, "signal SIGABRT", 30), "hang": (hang, "no answer within 3 seconds", 3)}


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
        with fault.plant(fault.function):
            result = child.run(probe, context)
        found[fault.name] = [result.id, result.verdict, result.text]
    return found


def faulty(name: str, connection: Connection, output: str) -> None:
    torch.set_num_threads(1)
    with cann_simulator.altered(PFA, tensors={"attentionOut": FATAL[name][0]}):
        child.serve(Context("npu:0"), connection, output)


def fatal(name: str) -> list[str]:
    """Returns the result of a probe that ends its process, or does not come back."""
    with runner.Runner(partial(faulty, name), FATAL[name][2]) as running:
        probe = next(x for x in running.probes() if fnmatchcase(x.id, LINES[PFA]))
        result = running.run(probe)
    return [result.id, result.verdict, result.text]


class InThisProcess(AbstractContextManager["InThisProcess"]):
    """In the place of check's Runner, for probes that neither crash nor hang."""

    def __init__(self, serve: partial[None], hang: float) -> None:
        (self._context,) = serve.args
        child.limit_memory(self._context)

    def __exit__(self, *error: object) -> None:
        pass

    def probes(self) -> list[Probe]:
        return list(child.probes_of(self._context))

    def run(self, probe: Probe) -> Result:
        return child.run(probe, self._context)


def check_here(*arguments: str) -> int:
    """`python -m ascend_attn_check`, without a process for the probes."""
    command.Runner = InThisProcess  # type: ignore[misc, assignment]
    return main(list(arguments))
