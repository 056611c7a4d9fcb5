"""Public names document arguments, results and errors, and show numbers in examples, which run."""

import inspect
import re
from importlib import import_module

from support import fresh

PARTS = ("ops", "nn", "debug", "flash_attn", "flash_attn.flash_attn_3", "torch_npu", "distributed")
MODULES = [import_module(f"ascend_attn_ops.{part}") for part in PARTS]
TEXTS = {}
for module in reversed(MODULES):
    TEXTS |= {name: inspect.getdoc(getattr(module, name)) for name in module.__all__}


def test_sections_of_docstrings() -> None:
    for module in MODULES:
        for name in (x for x in module.__all__ if x[0] != "_"):
            item = getattr(module, name)
            # A function may leave sections to those that its first paragraph names.
            others = re.findall(r":\w+:`[\w.]*?(\w+)`", item.__doc__.partition("\n\n")[0])
            text = "\n\n".join([inspect.getdoc(item), *(TEXTS[x] for x in others)])
            signature = inspect.signature(item)
            wanted = ["Args|Attributes", "Raises", "Example"] if signature.parameters else []
            returns = signature.return_annotation not in (None, "None", inspect.Signature.empty)
            wanted += ["Returns"] if returns else []
            missing = [x for x in wanted if not re.search(f"^({x}):$", text, re.M)]
            assert missing in ([], ["Raises"] if name == "save_attention_policy" else []), name
            example = text.partition("\nExample:")[2]
            printed = re.sub(r"^ *(>>>|\.\.\.).*|Size.*", "", example, flags=re.M)
            assert not signature.parameters or re.search(r"\d", printed), name
            assert module is not MODULES[0] or "\nSource: " in text, name


PROGRAM = """
import doctest, importlib, sys, torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
failed = 0
for part in {parts}:
    module = importlib.import_module(f"ascend_attn_ops.{{part}}")
    for name in module.__all__:
        if name == "register_flash_attention_impl" and torch.__version__ < (2, 13):
            continue  # varlen_attn of torch 2.10 lacks arguments of its example
        item = getattr(module, name)
        for test in doctest.DocTestFinder().find(item, name, module=False, globs={{}}):
            failed += doctest.DocTestRunner().run(test).failed
sys.exit(failed)
"""


def test_the_examples_of_docstrings() -> None:
    ended = fresh.run(PROGRAM.format(parts=PARTS))
    assert ended.status == 0, ended.out + ended.err
