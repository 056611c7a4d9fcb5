"""A call with arguments that the prototype does not have does not compile."""

from __future__ import annotations

import subprocess
import sysconfig
from pathlib import Path

import torch_npu
from support.simulated_npu import once
from torch.utils.cpp_extension import include_paths

pytestmark = once

# The prototype of aclnnLightningIndexer, in csrc/npu/lightning_indexer.cpp.
ARGUMENTS = [
    "Tensor", "Tensor", "Tensor", "None", "None", "None", "Text", "Text",
    "int64_t", "int64_t", "int64_t", "int64_t", "bool", "Tensor", "Tensor",
]  # fmt: skip

# Another type in one place: (position, type).
WRONG = [
    (0, "List"), (0, "int64_t"), (3, "int64_t"), (6, "int64_t"), (6, "Tensor"), (8, "bool"),
    (8, "double"), (8, "int"), (12, "int64_t"), (12, "int"), (13, "Text"),
]  # fmt: skip


def test_only_the_prototypes_arguments_compile(tmp_path: Path) -> None:
    wrong = {
        f"argument {position} is {kind}": [*ARGUMENTS[:position], kind, *ARGUMENTS[position + 1 :]]
        for position, kind in WRONG
    }
    wrong |= {"one too few": ARGUMENTS[:-1], "one too many": [*ARGUMENTS, "Tensor"]}
    statements = [f"static_assert(Callable<{', '.join(ARGUMENTS)}>);"]
    for reason, arguments in wrong.items():
        statements.append(f'static_assert(!Callable<{", ".join(arguments)}>, "{reason}");')
    source = tmp_path / "call.cpp"
    source.write_text(
        f"""
        #include "npu/lightning_indexer.cpp"
        using namespace ascend_attn::aclnn;
        template <typename... Arguments>
        concept Callable = requires(Arguments... arguments) {{
          aclnn_lightning_indexer(arguments...);
        }};
        namespace types {{
        using Tensor = const at::Tensor&;
        using None = std::nullopt_t;
        using Text = std::string_view;
        using List = at::IntArrayRef;
        {"".join(statements)}
        }}
        """
    )
    headers = Path(torch_npu.__file__).parent / "include"
    folders = [
        Path(__file__).parents[2] / "csrc", headers, headers / "third_party/op-plugin",
        headers / "third_party/acl/inc", *include_paths(), sysconfig.get_paths()["include"],
    ]  # fmt: skip
    flags = [f"-I{folder}" for folder in folders]
    command = ["g++", "-std=c++20", "-fsyntax-only", *flags, str(source)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
