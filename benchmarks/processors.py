"""The tables of the documentation that compare processors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from results import Results
from tables import markdown, ms, share_of_peak

Comparison = Callable[[Sequence[Results]], str]


def widest(cpu: str) -> str:
    """Name a processor with one of its features: `AMD EPYC, AVX2`, `Intel Xeon, AVX512F`."""
    name, _, features = cpu.replace("(R)", "").removesuffix(")").partition(" (")
    name = name.partition(" Processor @")[0]
    present = features.split(", ")
    order = ("AMX_BF16", "AVX512_BF16", "AVX512F", "AVX2", "SVE")
    return ", ".join([name, *(x for x in order if x in present)][:2])


def processors(machines: Sequence[Results]) -> str:
    """The operators that all processors have measured."""
    header, rows = ["", "sizes"], []
    for results in machines:
        header += [f"{widest(results.cpu)}: ms", "share of its matmul peak"]
    for name in ("sparse_flash_attention", "sparse_flash_mla", "lightning_indexer",
                 "flash_attention_score", "prompt_flash_attention"):  # fmt: skip
        measured = [results.rows for results in machines]
        for benchmark, case, implementation in machines[0].rows:
            key = benchmark, case, implementation
            found = [rows.get(key, {}) for rows in measured]
            if (benchmark, implementation) == (name, "ours") and all("gflops" in x for x in found):
                first, _, sizes = case.partition(" ")
                operator, sizes = (name, case) if "=" in first else (first, sizes)
                cells = [cell for x in found for cell in (ms(x), share_of_peak(x))]
                rows.append([f"`{operator}`", sizes, *cells])
    return markdown(header, rows, 2)


def many_sequences(machines: Sequence[Results]) -> str:
    rows = []
    for results in machines:
        for (benchmark, case, implementation), few in results.rows.items():
            if (benchmark, implementation) == ("sinks_and_ropes", "few sequences"):
                sizes, _, step = case.split(", ")
                ours = results.rows[benchmark, case, "ours"]
                ratio = f"{few['seconds'] / ours['seconds']:.2f}x"
                label = widest(results.cpu)
                rows.append([label, sizes, step.replace("+", " + "), ms(ours), ms(few), ratio])
    header = ["", "sizes", "", "short ones, ms", "long ones, ms", "long ones take"]
    return markdown(header, rows, 3)


COMPARED: dict[str, Comparison] = {table.__name__: table for table in (processors, many_sequences)}
