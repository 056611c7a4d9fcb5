"""The tables of the documentation, each made of the results of a run.

A table is a function that returns Markdown of the results of one processor. The pages say where it
belongs; see write_tables.py, and processors.py for the tables of all processors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from results import Figures, Results

Table = Callable[[Results], str]
ByImplementation = Mapping[str, Figures]
NOTHING = "\N{EN DASH}"
NOT_MEASURED = "Not measured yet: run the benchmark below."


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]], text_columns: int = 1) -> str:
    """Return a table whose first columns are text, and whose others are figures."""
    rule = ["---"] * text_columns + ["---:"] * (len(header) - text_columns)
    lines = ["".join(f"| {x} " if x else "| " for x in cells) + "|" for cells in (header, *rows)]
    return "\n".join([lines[0], "|" + "|".join(rule) + "|", *lines[1:]])


def short(value: float) -> str:
    """Write a number with three digits, or all that are before the point."""
    digits = 2 - math.floor(math.log10(abs(value))) if value else 0
    return f"{value:,.{max(0, digits)}f}"


def ms(figures: Figures) -> str:
    return short(figures["seconds"] * 1e3)


def microseconds(figures: Figures) -> str:
    return short(figures["seconds"] * 1e6)


def share_of_peak(figures: Figures) -> str:
    return f"{figures['gflops'] / figures['peak_gflops']:.0%}"


def megabytes(figures: Figures, name: str = "bytes") -> str:
    return short(figures[name] / 1e6)


def takes(by: ByImplementation, name: str, ours: str = "ours") -> str:
    """Say how many times as long as ours another implementation takes."""
    return f"{by[name]['seconds'] / by[ours]['seconds']:.1f}x" if name in by else NOTHING


def memory(cases: Mapping[str, ByImplementation], implementations: Mapping[str, str]) -> str:
    """Return what a call adds at its peak, of the cases and implementations that have it."""
    return markdown(
        ["added memory, MB", *implementations.values()],
        [
            [case, *(megabytes(by[name]) for name in implementations)]
            for case, by in cases.items()
            if all("bytes" in by.get(name, {}) for name in implementations)
        ],
    )


def machine(results: Results) -> str:
    about, versions = results.about, results.about["versions"]
    count = about["machine"]["threads"]
    packages = ", ".join(f"{x} {versions[x]}" for x in ("torch", "torch_npu", "transformers"))
    return (
        f"The figures are of {about['date']}, with {packages}, on\n"
        f"{count} thread{'' if count == 1 else 's'} of this processor: {results.cpu}."
    )


def sparse_cases(results: Results) -> dict[str, dict[str, Figures]]:
    return results.cases("sparse_flash_attention") | results.cases("lightning_indexer")


def sparse_beside_torch(results: Results, with_reference: bool) -> str:
    columns = {
        "reference": "reference takes",
        "torch, masking": "torch takes, all pairs and a mask",
        "torch, gathering": "torch takes, gathering the keys",
    }
    if not with_reference:
        del columns["reference"]
    return markdown(
        ["", "ours, ms", "share of the matmul peak", *columns.values()],
        [
            [
                f"`{case.split()[0]}`",
                ms(by["ours"]),
                share_of_peak(by["ours"]),
                *(takes(by, name) for name in columns),
            ]
            for case, by in sparse_cases(results).items()
            if "torch, gathering" in by
        ],
    )


def sparse(results: Results) -> str:
    return sparse_beside_torch(results, with_reference=True)


def readme(results: Results) -> str:
    return sparse_beside_torch(results, with_reference=False)


def sparse_sizes(results: Results) -> str:
    """The sizes that are not in the table of sparse_beside_torch."""
    rows = [
        [f"`{operator}`", sizes, ms(by["ours"]), share_of_peak(by["ours"])]
        for case, by in sparse_cases(results).items()
        for operator, sizes in [case.split(" ", 1)]
        if not operator.startswith("lightning_indexer")
        and "torch, gathering" not in by
        and "seconds" in by["ours"]
    ]
    rows.sort(key=lambda row: row[0].strip("`"))
    return markdown(["", "sizes", "ours, ms", "share of the matmul peak"], rows, 2)


def memory_beside_needed(cases: Mapping[str, ByImplementation]) -> str:
    rows = [
        [
            f"`{case.split()[0]}`",
            case.split(" ", 1)[1],
            megabytes(by["ours"]),
            megabytes(by["ours"], "bytes_needed"),
        ]
        for case, by in cases.items()
        if "bytes" in by["ours"]
    ]
    return markdown(["added memory, MB", "sizes", "in all", "outputs and accumulators"], rows, 2)


def sparse_memory(results: Results) -> str:
    return memory_beside_needed(sparse_cases(results))


def indexer(results: Results) -> str:
    return markdown(
        ["", "sizes", "ours, ms", "share of the matmul peak", "torch takes, all scores in memory"],
        [
            [
                f"`{case.split()[0]}`",
                case.split(" ", 1)[1],
                ms(by["ours"]),
                share_of_peak(by["ours"]),
                takes(by, "torch, all scores"),
            ]
            for case, by in results.cases("lightning_indexer").items()
            if case.startswith("lightning_indexer")
        ],
        2,
    )


def compressed_keys(results: Results) -> str:
    if not results.measured("sparse_flash_mla"):
        return NOT_MEASURED
    rows = []
    for case, by in results.cases("sparse_flash_mla").items():
        operator, kind, sizes = case.split(" ", 2)
        if operator == "decode":
            continue
        times = ms(by["ours"]), share_of_peak(by["ours"]), takes(by, "torch, masking")
        rows.append([f"`{operator}`", kind, sizes, *times])
    rows.sort(key=lambda row: row[0].strip("`"))
    header = ["", "layer", "sizes", "ours, ms", "share of the matmul peak"]
    return markdown([*header, "torch takes, all pairs and a mask"], rows, 3)


def compressed_memory(results: Results) -> str:
    if not results.measured("sparse_flash_mla"):
        return NOT_MEASURED
    return memory_beside_needed(results.cases("sparse_flash_mla"))


def compressed_decode(results: Results) -> str:
    if not results.measured("sparse_flash_mla"):
        return NOT_MEASURED
    rows = []
    for case, by in results.cases("sparse_flash_mla").items():
        step, kind, sizes = case.split(" ", 2)
        if step == "decode":
            rows.append([kind, sizes, *(ms(by[name]) for name in ("ours", "reading", "products"))])
    header = ["layer", "sizes", "ours, ms", "one reading of the keys, ms", "the products, ms"]
    return markdown(header, rows, 2)


def training_rows(
    results: Results, benchmark: str, labels: Mapping[str, str], reference: str
) -> Iterable[list[str]]:
    """Per length and way: tokens/s, how many times as long it takes, memory."""
    for by in results.cases(benchmark).values():
        shown = f"{by[reference]['tokens']:.0f}"
        for name, label in labels.items():
            if name not in by:
                yield [shown, label, *[NOTHING] * 3]
            else:
                figures = by[name]
                speed = short(figures["tokens"] / figures["seconds"])
                ratio = "" if name == reference else takes(by, name, reference)
                yield [shown, label, speed, ratio, megabytes(figures)]
            shown = ""


def training_step(results: Results) -> str:
    labels = {"ours, sparse": "sparse", "ours, dense": "dense", "eager": "plain torch"}
    shares = [
        f"{by[name]['share_of_operators']:.0%}" if name.startswith("ours") else ""
        for by in results.cases("training_step").values()
        for name in labels
    ]
    rows = training_rows(results, "training_step", labels, "ours, sparse")
    header = ["tokens", "", "tokens/s", "time beside sparse", "peak memory of a step, MB"]
    header.append("time in our operators")
    return markdown(header, [[*row, share] for row, share in zip(rows, shares, strict=True)], 2)


def crossing(points: Sequence[tuple[float, float]]) -> float | None:
    """Return the x from which on y > 1, or None: straight lines between points of log x, log y."""
    if not points or points[-1][1] <= 1:
        return None
    (x_after, y_after), *before = reversed(points)
    for x, y in before:
        if y <= 1:
            part = math.log(y_after) / (math.log(y_after) - math.log(y))
            return x_after * (x / x_after) ** part
        x_after, y_after = x, y
    return x_after


def crossover(results: Results) -> str:
    points = []
    for by in results.cases("training_step").values():
        dense, sparse = by["ours, dense"], by["ours, sparse"]
        points.append((sparse["tokens"], dense["seconds"] / sparse["seconds"]))
    tokens = crossing(points)
    selected = f"{sparse['selected']:.0f} selected keys"
    if tokens is None:
        return f"With {selected}, dense is the faster one at every length that was measured."
    if tokens == points[0][0]:
        return f"With {selected}, sparse is the faster one at every length that was measured."
    return (
        f"With {selected}, sparse is the faster one from about {round(tokens, -2):.0f} tokens on. "
        "Below that,\nchoosing the keys costs more than the attention to the others would."
    )


def transformers_training(results: Results) -> str:
    labels = {
        "ours": "`enable_dsa`", "eager": "transformers, eager", "sdpa": "transformers, sdpa"
    }  # fmt: skip
    header = ["tokens", "", "tokens/s", "time beside ours", "peak memory of a step, MB"]
    return markdown(header, training_rows(results, "transformers_training", labels, "ours"), 2)


def decode(results: Results) -> str:
    columns = {
        "ours, indexer": "indexer",
        "ours, attention": "attention to K keys",
        "ours, sparse": "both",
        "ours, dense": "attention to all keys",
        "torch": "torch, all keys",
        "limit": "limit of both",
    }
    rows = []
    for by in results.cases("sparse_decode").values():
        if "torch" in by:
            sparse = by["ours, sparse"]
            sizes = [f"{sparse['batch']:.0f}", f"{sparse['keys']:.0f}"]
            rows.append([*sizes, *(ms(by[name]) for name in columns)])
    return markdown(["B", "keys", *columns.values()], rows, 0)


def decode_memory(results: Results) -> str:
    return memory(results.cases("sparse_decode"), {"ours, sparse": "a step of ours"})


def paging(results: Results) -> str:
    name = "paged against side by side"
    return markdown(
        ["keys through the block table take", "in the indexer", "in the attention"],
        [
            [case.replace("=", " ").replace(" keys", ", keys"), *(f"{x:.2f}x" for x in ratios)]
            for case, by in results.cases("sparse_decode").items()
            if name in by
            for ratios in [(by[name]["indexer"], by[name]["attention"])]
        ],
    )


def dense(results: Results) -> str:
    peers = ("torch SDPA", "torch formula")
    rows = []
    for case, by in results.cases("flash_attention_score").items():
        sizes, step = case.split(", ")
        columns = [ms(by["ours"]), share_of_peak(by["ours"]), *(takes(by, x) for x in peers)]
        rows.append([sizes, step.replace("+", " + "), *columns])
    header = ["sizes", "", "ours, ms", "share of the matmul peak", "SDPA takes", "formula takes"]
    return markdown(header, rows, 2)


def dense_memory(results: Results) -> str:
    columns = {"ours": "ours", "torch SDPA": "SDPA", "torch formula": "formula"}
    return memory(results.cases("flash_attention_score"), columns)


def sinks_and_ropes(results: Results) -> str:
    peers = {
        "a sink": ("without",),
        "ropes": ("joined heads", "joined in the call"),
    }
    rows = []
    for case, by in results.cases("sinks_and_ropes").items():
        sizes, kind, step = case.split(", ")
        for peer in peers.get(kind, ()):
            ratio = by[peer]["seconds"] / by["ours"]["seconds"]
            columns = [peer, ms(by["ours"]), f"{ratio:.2f}x"]
            rows.append([sizes, f"{kind}, {step.replace('+', ' + ')}", *columns])
    header = ["sizes", "with", "the alternative", "ours, ms", "it takes"]
    return markdown(header, rows, 3)


def dense_decode(results: Results) -> str:
    rows = []
    for case, by in results.cases("dense_decode").items():
        sizes, keys = case.split(", keys=")
        rows.append([sizes, keys, ms(by["ours"]), takes(by, "torch SDPA"), ms(by["limit"])])
    header = ["sizes", "keys", "ours, ms", "SDPA takes", "one reading of keys and values, ms"]
    return markdown(header, rows)


def serving(results: Results) -> str:
    if not results.measured("fused_infer_attention_score"):
        return NOT_MEASURED
    rows = []
    for case, by in results.cases("fused_infer_attention_score").items():
        sizes, tokens, form = case.split(", ")
        times = ms(by["ours"]), takes(by, "torch SDPA"), ms(by["reading"]), ms(by["products"])
        rows.append([sizes, tokens, form, *times])
    header = ["sizes", "queries over keys", "keys in", "ours, ms", "SDPA takes"]
    return markdown([*header, "one reading of the keys, ms", "the products, ms"], rows, 3)


def prefill(results: Results) -> str:
    peer = "torch SDPA"
    rows = [
        [case, ms(by["ours"]), share_of_peak(by["ours"]), takes(by, peer)]
        for case, by in results.cases("prompt_flash_attention").items()
        if peer in by
    ]
    return markdown(["prompts", "ours, ms", "share of the matmul peak", "SDPA takes"], rows)


def prefill_memory(results: Results) -> str:
    columns = {"ours": "ours", "ours, int8": "ours in int8", "torch SDPA": "SDPA"}
    return memory(results.cases("prompt_flash_attention"), columns)


def prefill_int8(results: Results) -> str:
    columns = {
        "ours, from bfloat16": "with quantisation takes",
        "ours, flash_attention_score": "bfloat16, `flash_attention_score` takes",
        "ours, bfloat16": "bfloat16, `prompt_flash_attention` takes",
    }
    return markdown(
        ["prompts", "int8, ms", *columns.values()],
        [
            [case, ms(by["ours"]), *(takes(by, name) for name in columns)]
            for case, by in results.cases("prompt_flash_attention").items()
            if "ours, bfloat16" in by
        ],
    )


def products(results: Results) -> str:
    vectors = {"baseline": "128 bits", "avx2": "256 bits, AVX2", "avx512": "512 bits, AVX512"}
    columns = {
        "ours": "ours", "three loops": "three plain loops", "torch.mm": "torch.mm",
        "limit": "the limit of the vector unit",
    }  # fmt: skip
    rows = []
    for case, by in results.cases("products").items():
        sizes, capability = case.split(", ")
        reached = (f"{by[name]['gflops']:.0f}" for name in columns)
        rows.append([vectors[capability], sizes, *reached])
    return markdown(["vectors", "product", *columns.values()], rows, 2)


def scatter(results: Results) -> str:
    rows = []
    for case, by in results.cases("scatter_pa_kv_cache").items():
        layout, slots, tokens = case.split(", ")
        peers = (takes(by, name) for name in ("flat", "by block", "copy_"))
        rows.append([layout, slots, tokens, microseconds(by["ours"]), *peers])
    peers_header = ["flat takes", "by block takes", "copy_ of the same bytes takes"]
    return markdown(["layout", "", "tokens", "ours, µs", *peers_header], rows, 2)


def host_time(results: Results) -> str:
    rows = []
    for case, by in results.cases("host_time").items():
        name, level = case.split(", level ")
        if "parts" in by["ours"]:
            continue
        theirs = by["torch_npu"]
        cells = [
            f"{microseconds(by[ours])} ({by[ours]['seconds'] / theirs['seconds']:.2f})"
            for ours in ("ours", "ours, torch.ops")
        ]
        bare = microseconds(by["two phases"]) if "two phases" in by else NOTHING
        rows.append([f"`{name}`", level, *cells, microseconds(theirs), bare])
    header = ["", "`TASK_QUEUE_ENABLE`", "`ascend_attn_ops`", "`torch.ops.ascend`", "torch_npu"]
    return markdown([*header, "the two bare C calls"], rows)


def call_overhead(results: Results) -> str:
    return markdown(
        ["", "µs"],
        [
            [case, microseconds(figures)]
            for case, by in results.cases("call_overhead").items()
            if "ours, by name" not in by
            for figures in by.values()
        ],
    )


def flash_attn_names(results: Results) -> str:
    rows = []
    for case, by in results.cases("call_overhead").items():
        if "ours, by name" in by:
            operator, name = by["ours, operator"], by["ours, by name"]
            adds = (name["seconds"] - operator["seconds"]) * 1e6
            label = f"`{case}`" if ", " not in case else "`{}`, {}".format(*case.split(", "))
            rows.append([label, microseconds(operator), microseconds(name), f"{adds:.1f}"])
    return markdown(["µs", "the operator", "by the name", "adds"], rows)


def dtensor(results: Results) -> str:
    cases = results.cases("dtensor_call")
    return markdown(
        ["call", "µs"], [[case, microseconds(by["ours"])] for case, by in cases.items()]
    )


def threads(results: Results) -> str:
    cases = results.cases("threads")
    counts = sorted({int(x["threads"]) for by in cases.values() for x in by.values()})
    rows = []
    for case, by in cases.items():
        one, *more = sorted(by.values(), key=lambda figures: figures["threads"])
        label = case if case.startswith("torch") else "`{}`{}{}".format(*case.partition(", "))
        rows.append([label, ms(one), *(f"{one['seconds'] / x['seconds']:.2f}x" for x in more)])
    faster = [f"with {count} threads" for count in counts[1:]]
    return markdown(["", "1 thread, ms", *faster], rows)


def simulated(results: Results) -> str:
    cpu, npu = "torch, CPU", "ours, simulated NPU"
    rows = []
    for case, by in results.cases("simulated_operators").items():
        unit = ms if case == "training step" else microseconds
        label = f"{case}, ms" if case == "training step" else case
        rows.append([label, unit(by[cpu]), unit(by[npu])])
    return markdown(["µs per call", "CPU", "NPU"], rows)


TABLES: dict[str, Table] = {
    table.__name__: table
    for table in (
        machine, readme, sparse, sparse_sizes, sparse_memory, training_step, crossover,
        transformers_training, indexer, compressed_keys, compressed_memory, compressed_decode,
        serving, decode, decode_memory, paging, dense, dense_memory, sinks_and_ropes, dense_decode,
        prefill, prefill_int8, prefill_memory, products, scatter, host_time, call_overhead,
        flash_attn_names, dtensor, threads, simulated,
    )
}  # fmt: skip
