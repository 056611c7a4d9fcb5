"""Records a case that ends its process."""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import resource
from pathlib import Path

_SIZE = 512


class Journal:
    """A line in a file that outlives the process which wrote it.

    A process that a signal kills writes nothing more, so the line is written before every case. The
    file is mapped into memory: a line costs a copy, not a call of the system.
    """

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(_SIZE))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _SIZE)

    def remember(self, line: str) -> None:
        self._map[:] = line.encode()[:_SIZE].ljust(_SIZE, b"\0")


def remembered(path: Path) -> str:
    """The last line of the journal at `path`, also while another process writes to it."""
    return path.read_bytes().rstrip(b"\0").decode(errors="replace")


def has_sanitizer() -> bool:
    """Returns whether AddressSanitizer is loaded, as tools/sanitize.py does."""
    return hasattr(ctypes.CDLL(None), "__asan_init")


def protect() -> None:
    """Makes crashes of this process say where, and limits its memory."""
    # A sanitizer says more of a crash.
    if not has_sanitizer():
        faulthandler.enable()
    limit_memory()
    # A core of every crash would fill the disk.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def limit_memory(memory: int = 6 * 2**30) -> None:
    """Let the process take so much more. torch keeps the code of products of every size: the
    addresses of a long run would reach a limit that stays where it is."""
    # A sanitizer maps terabytes of addresses for what it knows of memory.
    if has_sanitizer():
        return
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + memory, most))
