"""Distributions are complete, and one line says what an environment lacks."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

import pytest
import torch
from ascend_attn_ops._core import built_with, library
from support.checkout import ROOT
from torch.utils.cpp_extension import include_paths

pytestmark = pytest.mark.smoke

# Useful in a checkout alone, or too large: the recorded calls of CANN's kernels have 5 MB.
NOT_DISTRIBUTED = re.compile(r"\.|tests/recorded/")
REMEDY = "install it again in this environment: pip install --no-build-isolation --no-deps ."

in_a_checkout = pytest.mark.skipif(
    not (ROOT / ".git").exists(), reason="not in a git checkout: no list of files to compare with"
)


def run_python(
    *arguments: str, folder: Path = ROOT, path: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run the interpreter with the packages in `path` before those that are installed."""
    places = [str(path)] if path else []
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places), **variables}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def source_distribution(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked archive."""
    folder = tmp_path_factory.mktemp("sdist")
    egg_info = ["egg_info", f"--egg-base={folder}"]
    made = run_python("setup.py", "-q", *egg_info, "sdist", f"--dist-dir={folder}")
    assert made.returncode == 0, made.stderr
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


def files_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@in_a_checkout
def test_the_source_distribution_has_every_file(source_distribution: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    wanted = {name for name in listed if not NOT_DISTRIBUTED.match(name)}
    found = files_below(source_distribution)
    assert wanted - found == set()
    generated = re.compile(r"PKG-INFO|setup\.cfg|.*\.egg-info/")
    untracked = {name for name in found - set(listed) if not generated.match(name)}
    assert not {name for name in untracked if name.endswith((".so", ".pyc", ".json"))}


@in_a_checkout
def test_the_source_distribution_compiles(source_distribution: Path) -> None:
    """Its headers are there for all files; of the files, one is compiled."""
    csrc = source_distribution / "csrc"
    for source in [*csrc.rglob("*.cpp"), *csrc.rglob("*.h")]:
        for header in re.findall(r'^#include "(.+)"', source.read_text(), re.M):
            folders = (csrc, source.parent)
            assert any((x / header).is_file() for x in folders), f"{source}: {header}"
    folders = [*include_paths(), sysconfig.get_paths()["include"]]
    command = [os.environ.get("CXX", "c++"), "-std=c++20", "-fsyntax-only", f"-I{csrc}"]
    command += [f"-isystem{folder}" for folder in folders]
    subprocess.run([*command, str(csrc / "core/tensor_checks.cpp")], check=True)


def write_package(folder: Path, name: str, code: str, version: str = "") -> None:
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(code)
    if version:
        information = folder / f"{name}-{version}.dist-info"
        information.mkdir()
        (information / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")


HERE = torch.__version__
MINOR = ".".join(HERE.split(".")[:2])


@pytest.mark.parametrize(
    ("package", "code", "version", "message"),
    [
        ("torch", 'raise ModuleNotFoundError("No module named torch")', "",
         "torch is not installed here; install torch (for the NPU kernels torch_npu too) first, "
         "and then this package with pip install --no-build-isolation"),
        ("torch", '__version__ = "2.6.0+cpu"', "",
         "it needs torch 2.7.1 or later, and torch 2.6.0+cpu is installed"),
        ("torch_npu", "", "2.6.0.post1",
         f"torch {HERE} and torch_npu 2.6.0.post1 do not belong together; install the torch_npu of "
         f"torch {MINOR}, or none"),
        ("torch_npu", "", f"{MINOR}.0", f"torch_npu {MINOR}.0 has no headers of op-plugin; "),
    ],
    ids=["none", "too old", "torch_npu of another torch", "no headers"],
)  # fmt: skip
def test_building_with_a_wrong_package(
    package: str, code: str, version: str, message: str, tmp_path: Path
) -> None:
    """The last line says it: before it, a torch for GPUs warns."""
    write_package(tmp_path, package, code, version)
    built = run_python("setup.py", "-q", "bdist_wheel", path=tmp_path)
    assert built.returncode == 1
    assert "Traceback" not in built.stderr
    last = built.stderr.splitlines()[-1]
    assert last.startswith(f"ascend_attn_ops cannot be built: {message}")
    assert message.endswith("; ") or last.endswith(message)


@pytest.mark.parametrize("folder", [".", "simulation"])
def test_building_with_a_python_that_is_too_old(folder: str) -> None:
    script = (
        "import runpy, setuptools, sys\n"
        "sys.version_info, sys.version, sys.argv = (3, 9, 18), '3.9.18 (main)', ['setup.py']\n"
        "runpy.run_path('setup.py', run_name='__main__')\n"
    )
    built = run_python("-c", script, folder=ROOT / folder)
    assert built.returncode == 1
    name = "ascend_attn_ops" if folder == "." else "cann_simulator"
    assert built.stderr.splitlines() == [
        f"{name} cannot be built: it needs Python 3.10 or later, and this is Python 3.9.18"
    ]


def import_failure(code: str, path: Path = ROOT / "python") -> str:
    """The last line of what an import says, without the traceback."""
    failed = run_python("-c", code, path=path, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert failed.returncode == 1
    return failed.stderr.splitlines()[-1]


def test_importing_under_another_torch() -> None:
    built = built_with.versions("_C")["torch"]
    code = "import torch; torch.__version__ = '2.99.0'; import ascend_attn_ops"
    assert import_failure(code) == (
        f"ImportError: ascend_attn_ops._C was built with torch {built}, and torch 2.99.0 is "
        f"installed; {REMEDY}"
    )


def test_importing_what_is_not_built(tmp_path: Path) -> None:
    sources = ROOT / "python/ascend_attn_ops"
    built = shutil.ignore_patterns("*.so", "built_with.json")
    shutil.copytree(sources, tmp_path / "ascend_attn_ops", ignore=built)
    python = ".".join(map(str, sys.version_info[:2]))
    assert import_failure("import ascend_attn_ops", tmp_path) == (
        f"ImportError: ascend_attn_ops._C is not built (for Python {python}); {REMEDY}"
    )


@pytest.mark.parametrize("wanted", ["1", "0"])
def test_other_backends_load_as_torch_would_load_them(wanted: str, tmp_path: Path) -> None:
    write_package(tmp_path, "mine", "def load(): print('loaded')", "1.0")
    points = tmp_path / "mine-1.0.dist-info/entry_points.txt"
    points.write_text("[torch.backends]\nmine = mine:load\n")
    place = str(ROOT / "python")
    code = f"import sys; sys.path.insert(0, {place!r}); import ascend_attn_ops, torch"
    ran = run_python("-c", code, path=tmp_path, TORCH_DEVICE_BACKEND_AUTOLOAD=wanted)
    assert ran.stdout == ("loaded\n" if wanted == "1" else ""), ran.stderr


def test_another_torch_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another minor version is refused; another post release, where it cannot be loaded."""
    built = {"torch": torch.__version__, "torch_npu": "2.10.0.post4"}
    monkeypatch.setattr(built_with, "versions", lambda module: built)
    for here, other_minor in [("2.9.0.post1", True), ("2.10.0.post7", False)]:
        installed = {**built, "torch_npu": here}
        monkeypatch.setattr(built_with, "installed", installed.get)
        expected = (
            f"ascend_attn_ops._npu was built with torch_npu 2.10.0.post4, and torch_npu {here} is "
            f"installed; {REMEDY}"
        )
        assert built_with.difference("_npu") == expected
        by_minor = built_with.difference("_npu", built_with.minor)
        assert by_minor == (expected if other_minor else None)


FAILURES = [OSError, AttributeError, KeyError, AssertionError]


@pytest.mark.parametrize(
    ("module", "error"),
    [
        *(("torch_npu", error) for error in [*FAILURES, SystemExit]),
        *(("ascend_attn_ops._npu", error) for error in FAILURES),
    ],
)
def test_what_fails_beside_the_cpu_is_told(
    module: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(name: str) -> None:
        if name == module:
            raise error("first line\nsecond line")

    monkeypatch.setattr(library.importlib, "import_module", load)
    monkeypatch.setattr(library.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(library.ctypes, "CDLL", lambda name: name)
    monkeypatch.setattr(built_with, "mismatch", lambda module: None)
    monkeypatch.setattr(built_with, "difference", lambda module: None)
    told = library._load_npu()
    assert told is not None
    name = module.removeprefix("ascend_attn_ops.")
    assert told.startswith(f"{name} cannot be loaded: ")
    assert "first line" in told
    assert "second" not in told or error is KeyError  # whose text is a repr


def test_the_report_names_what_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    from ascend_attn_ops import _C
    from ascend_attn_ops.debug import report

    assert report.print_report() == 0
    printed = capsys.readouterr().out
    assert f"built with torch {built_with.versions('_C')['torch']}, {_C.compiler}" in printed
    for implementation in _C.cpu_implementations().values():
        assert implementation in printed
    assert library.npu_unavailable is None or library.npu_unavailable in printed


@pytest.mark.parametrize(
    ("arguments", "variables", "language"),
    [
        ([], {}, "en"), (["report", "--lang", "zh"], {}, "zh"), ([], {"LANG": "zh_CN.UTF-8"}, "zh"),
        ([], {"LANG": "zh_CN.UTF-8", "LC_ALL": "C.UTF-8"}, "en"),
        ([], {"LANG": "C", "LC_ALL": "", "LC_MESSAGES": "zh_CN"}, "zh"),
    ],
)  # fmt: skip
def test_an_option_or_the_locale_chooses_the_language(
    arguments: list[str], variables: dict[str, str], language: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    from ascend_attn_ops.__main__ import main

    for name in ("LC_ALL", "LC_MESSAGES", "LANG"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(arguments) == 0
    assert ("算子" in capsys.readouterr().out) == (language == "zh")
