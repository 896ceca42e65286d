"""Script that removes unneeded files from the image's Python environment.

The command is ``python lean.py FOLDER``, with the folder of the installed packages.

Wheels contain tests, sources for compiling extensions, types for type checkers, and debug symbols.
No other module imports the removed modules.
"""

from __future__ import annotations

import shutil
import struct
import sys
from pathlib import Path

FOLDERS = ("tests", "f2py", "distutils", "include")
"""Folders to remove. The last three belong to numpy, for compiling extensions."""

PACKAGES = (
    *("asyncpg/_testbase", "grpc/beta", "grpc/framework", "tritonclient/http"),
    *(f"numpy/{name}" for name in ("fft", "polynomial", "random", "testing")),
)
"""Packages to remove: test helpers, old interfaces, an unused client, unused mathematics."""

FILES = (
    *("*.pyi", "*.pyx", "*.pxd", "*.pxi", "*.c", "*.h", "*.a"),
    # modules that only numpy's tests import
    *("_simd.*.so", "_*_tests.*.so", "_struct_ufunc_tests.*.so"),
)

_ELF_64_LITTLE_ENDIAN = b"\x7fELF\x02\x01"


def remove_unneeded(folder: Path) -> None:
    for name in FOLDERS:
        for found in list(folder.glob(f"**/site-packages/*/**/{name}")):
            if found.is_dir():
                shutil.rmtree(found)
    for name in PACKAGES:
        for found in list(folder.glob(f"**/site-packages/{name}")):
            shutil.rmtree(found)
    for pattern in FILES:
        for found in folder.rglob(pattern):
            found.unlink()


def strip(library: Path) -> None:
    """Truncate a library after the last byte that is loaded.

    This removes debug information, all symbols except those for dynamic linking, and the section
    table, which only tools read. binutils could do this, but the image does not have binutils, and
    PyPI has no package of it.
    """
    data = bytearray(library.read_bytes())
    if not data.startswith(_ELF_64_LITTLE_ENDIAN):
        return
    [table] = struct.unpack_from("<Q", data, 32)
    size, count = struct.unpack_from("<HH", data, 54)
    end = table + size * count
    for header in range(table, end, size):
        [offset] = struct.unpack_from("<Q", data, header + 8)
        [length] = struct.unpack_from("<Q", data, header + 32)
        end = max(end, offset + length)
    struct.pack_into("<Q", data, 40, 0)  # position 0: the file has no section table now
    struct.pack_into("<HH", data, 60, 0, 0)
    library.write_bytes(data[:end])


def main(folder: Path) -> None:
    remove_unneeded(folder)
    for pattern in ("*.so", "*.so.*"):
        for library in folder.rglob(pattern):
            if not library.is_symlink():
                strip(library)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
