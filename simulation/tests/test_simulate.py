"""How a program gets simulated NPUs: the launcher, pytest's plugin, `start`, child processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import cann_simulator
import pytest
import torch
import torch_npu
from ascend_attn_ops import _C
from cann_simulator._products import SOC_OF_PRODUCT, device_of
from support.simulated_npu import once
from torch.utils.cpp_extension import include_paths

ROOT = Path(__file__).parents[2]
PACKAGES = os.pathsep.join(str(ROOT / folder) for folder in ("python", "simulation"))


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the interpreter as where nothing is simulated."""
    simulation = cann_simulator.environment().keys()
    environment = {name: x for name, x in os.environ.items() if name not in simulation}
    return subprocess.run(
        [sys.executable, *arguments], env={**environment, "PYTHONPATH": PACKAGES, **variables},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def run_code(code: str) -> subprocess.CompletedProcess[str]:
    return run("-c", textwrap.dedent(code))


def write(path: Path, code: str) -> str:
    path.write_text(textwrap.dedent(code))
    return str(path)


PROGRAM = """
    import sys
    import torch

    x = torch.ones(2, 3, device="npu")
    print(sys.argv[1:], __name__, (x @ x.T).tolist(), torch.npu.device_count())
"""


@once
def test_a_script(tmp_path: Path) -> None:
    calls = tmp_path / "calls.jsonl"
    script = write(
        tmp_path / "script.py",
        """
        import sys

        import ascend_attn_ops
        import torch

        x = torch.ones(1, 16, 1, 64, dtype=torch.float16, device="npu")
        y, *_ = ascend_attn_ops.flash_attention_score(x, x, x, num_heads=1, layout="BSND")
        print(sys.argv, __name__, y.sum().item(), torch.npu.device_count())
        """,
    )
    options = f"--devices 3 --product A3 --cann 9.0 --calls {calls} --report"
    ran = run("-m", "cann_simulator", *options.split(), script, "--soc", "x")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-1] == f"{[script, '--soc', 'x']} __main__ 1024.0 3"
    lines = ran.stderr.splitlines()
    what = "cann_simulator: 3 simulated Ascend910_9391 with CANN 9.0"
    # Some releases of torch and torch_npu warn before, when they are imported.
    first = next(i for i, line in enumerate(lines) if line.startswith(what))
    others = lines[first + 1 :]

    (call,) = (
        entry
        for entry in map(json.loads, calls.read_text().splitlines())
        if "Attention" in entry["function"]
    )
    assert call["function"] == "aclnnFlashAttentionScoreV2"
    assert call["arguments"]["query"]["sizes"] == [1, 16, 1, 64]
    assert call["arguments"]["query"]["dtype"] == "Half"
    assert {"device", "stream", "process"} <= call.keys()

    report = [" ".join(line.split()) for line in others]
    assert "1 aclnnFlashAttentionScoreV2" in report
    assert "1 aten::sum" in report
    assert "refused, by the rules of Ascend A3 with CANN 9.0: 0" in report


@once
def test_a_module_and_its_children(tmp_path: Path) -> None:
    """Children inherit the simulation, however they are started."""
    write(
        tmp_path / "parent.py",
        """
        import multiprocessing, subprocess, sys
        import torch

        def child(number):
            return torch.full((2,), number, device="npu:1").sum().item(), torch.npu.device_count()

        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(child, [3]))
            code = "import torch; print(torch.arange(4, device='npu').sum().item())"
            print(subprocess.check_output([sys.executable, "-c", code], text=True))
        """,
    )
    ran = run(
        "-m", "cann_simulator", "-m", "parent",
        PYTHONPATH=os.pathsep.join([PACKAGES, str(tmp_path)]),
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split("\n")[:2] == ["[(6, 2)]", "6"]


@once
def test_the_plugin_of_pytest(tmp_path: Path) -> None:
    """Before a conftest.py that imports torch_npu."""
    write(tmp_path / "conftest.py", "import torch_npu\n")
    tests = write(
        tmp_path / "test_it.py",
        """
        import torch

        def test_it():
            assert torch.npu.get_device_name() == "Ascend310P3"
            assert torch.ones(3).npu().sum().item() == 3
        """,
    )
    plugin = ("-m", "pytest", "-q", "-p", "cann_simulator", tests)
    ran = run(*plugin, CANN_SIMULATOR="--product 310P")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "1 passed" in ran.stdout
    assert "simulated Ascend310P3" in ran.stderr


@once
def test_start(tmp_path: Path) -> None:
    """Starting again changes nothing; with other options it is refused."""
    ran = run_code("""
        import cann_simulator
        from ascend_attn_ops.debug import report
        cann_simulator.start(product="A2")
        cann_simulator.start(product="Ascend910B2")
        try:
            cann_simulator.start(product="A3")
        except RuntimeError as error:
            print(error)
        report.print_report()
    """)
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    assert lines[0].endswith("simulated CANN already, with CANN_SIM_SOC=Ascend910B2")
    (cann,) = (line for line in lines if line.startswith("  CANN"))
    assert "9.1.0" in cann
    assert "/cann_simulator/cann/lib64/libascendcl.so" in cann
    assert "2 simulated Ascend910B2 with CANN 9.1" in ran.stderr


@once
@pytest.mark.parametrize("variable", ["ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"])
def test_a_real_cann_is_not_hidden(tmp_path: Path, variable: str) -> None:
    (tmp_path / "lib64").mkdir()
    (tmp_path / "lib64/libascendcl.so").touch()
    script = write(tmp_path / "script.py", PROGRAM)
    launcher = ("-m", "cann_simulator")
    refused = run(*launcher, script, **{variable: str(tmp_path)})
    assert refused.returncode == 1
    assert "there is a real CANN here" in refused.stderr
    assert str(tmp_path / "lib64/libascendcl.so") in refused.stderr
    forced = run(*launcher, "--force", script, **{variable: str(tmp_path)})
    assert forced.stdout.splitlines()[-1] == "[] __main__ [[3.0, 3.0], [3.0, 3.0]] 2"


@once
def test_what_start_says_is_missing(tmp_path: Path) -> None:
    for version, expected in [
        (None, "torch_npu is not installed: pip install --no-deps"),
        ("2.6.0.post1", "the simulated CANN was built with torch 2."),
    ]:
        code = """
            import importlib.util, sys
            from importlib import metadata
            import cann_simulator
            version, find = VERSION, importlib.util.find_spec
            if version is None:
                importlib.util.find_spec = lambda x: None if x == "torch_npu" else find(x)
            else:
                metadata.version = lambda name: version
            try:
                cann_simulator.start()
            except ImportError as error:
                print(error)
        """.replace("VERSION", repr(version), 1)
        ran = run_code(code)
        assert ran.stdout.startswith(expected), ran.stderr


def test_options_that_do_not_exist() -> None:
    with pytest.raises(ValueError, match=r"product: .* Ascend910B2.*got Ascend910A"):
        cann_simulator.environment(product="Ascend910A")
    with pytest.raises(ValueError, match=r"cann: expected one of 8\.5, 9\.0, 9\.1; got 7\.0"):
        cann_simulator.environment(cann="7.0")
    with pytest.raises(ValueError, match="devices: expected 1 to 16, got 0"):
        cann_simulator.environment(devices=0)
    assert list(SOC_OF_PRODUCT) == [name for name, _ in _C.products]
    for name, prefix in _C.products:
        assert device_of(name) == (name, SOC_OF_PRODUCT[name])
        assert device_of(f"{prefix}_7") == (name, f"{prefix}_7")


FAST_GELU = """
#include <ATen/ATen.h>
#include "opapi/core/opapi.h"

static torch::jit::Stack fast_gelu(const cann_sim::Call& call) {
  const auto x = call.tensor("self");
  TORCH_CHECK(x.numel() > 0, "nothing today");
  return {x * at::sigmoid(x * 1.702)};
}
CANN_SIM_FUNCTION(aclnnFastGelu, {.compute = fast_gelu}, cann_sim::input("self"),
                  cann_sim::output("out"))

// vLLM-Ascend's package has a function of CANN's name, with other arguments.
extern "C" int aclnnKvQuantSparseFlashAttentionGetWorkspaceSize() { return 161002; }
extern "C" int aclnnKvQuantSparseFlashAttention() { return 161002; }
"""


@once
def test_a_function_of_the_user(tmp_path: Path) -> None:
    """A libcust_opapi.so, in which torch_npu looks first: as simulation/README.md shows."""
    library = tmp_path / "op_api/lib/libcust_opapi.so"
    library.parent.mkdir(parents=True)
    headers = [
        ROOT / "simulation/csrc", *include_paths(),
        Path(torch_npu.__file__).parent / "include/third_party/acl/inc",
    ]  # fmt: skip
    folders = [ROOT / "simulation/cann_simulator/cann/lib64", Path(torch.__file__).parent / "lib"]
    subprocess.run(
        ["c++", "-std=c++20", "-shared", "-fPIC", write(tmp_path / "fast_gelu.cpp", FAST_GELU),
         "-o", library, *(f"-I{x}" for x in headers), *(f"-L{x}" for x in folders),
         *(f"-l{x}" for x in ("opapi", "torch_cpu", "c10"))],
        check=True,
    )  # fmt: skip
    script = """
        import torch
        import torch_npu

        x = torch.randn(4, 6)
        out = torch_npu.npu_fast_gelu(x.npu().t())
        print(torch.equal(out.cpu(), (x * torch.sigmoid(1.702 * x)).t()))
        try:
            torch_npu.npu_fast_gelu(torch.ones(0).npu())
        except RuntimeError as error:
            print(error)
        from ascend_attn_check.samples import OPERATORS

        operator = OPERATORS["kv_quant_sparse_flash_attention"]
        sample = next(x for x in operator.recipes if x.on_device).make(torch.bfloat16)
        on_npu = sample.to("npu")
        out, expected = (x.call(torch.ops.ascend)[0].cpu() for x in (on_npu, sample))
        print("CANN's own:", torch.equal(out, expected))
        try:
            operator.torch_npu(on_npu.arguments)
        except RuntimeError as error:
            print("torch_npu calls the other:", "161002" in str(error))
    """
    calls = tmp_path / "calls.jsonl"
    options = ["--task-queue", "0", "--calls", str(calls), write(tmp_path / "script.py", script)]
    ran = run("-m", "cann_simulator", *options, ASCEND_CUSTOM_OPP_PATH=str(tmp_path))
    assert ran.stdout.startswith("True"), ran.stderr
    assert "aclnnFastGelu: nothing today" in ran.stdout
    assert "CANN's own: True\ntorch_npu calls the other: True\n" in ran.stdout, ran.stderr
    call = json.loads(calls.read_text().splitlines()[0])
    assert (call["function"], call["arguments"]["self"]["sizes"]) == ("aclnnFastGelu", [6, 4])
