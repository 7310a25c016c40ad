"""Libraries of CUDA with nothing in them: a build of torch for CUDA can be imported beside them, and runs on the CPU.

PyPI has torch for Linux as builds for CUDA alone, with gigabytes of libraries that a run on the CPU never calls, but
that have to be there. ``make`` writes those that a build asks for; each function of them returns 100,
``cudaErrorNoDevice``, so torch finds no GPU. It needs ``cc``, ``nm`` and ``readelf``.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

_LIBRARY = re.compile(r"lib(cu|nv|nccl)")
_FUNCTION = re.compile(r"(__)?(cu|nv|nccl)")
_NO_DEVICE = 100
_TOOLS = ("cc", "nm", "readelf")


def can_be_made() -> bool:
    return all(map(shutil.which, _TOOLS))


def make(torch: Path, into: Path) -> None:
    """Write the libraries that are wanted in the folder ``into``, which goes into ``LD_LIBRARY_PATH``."""
    of_torch = [*torch.glob("*.so"), *(torch / "lib").glob("*.so")]
    headers = [_output("readelf", "--dynamic", "--version-info", "--wide", str(path)) for path in of_torch]
    wanted: dict[str, dict[str, set[str]]] = {}  # of each library: of each version, the functions
    for library in {name for said in headers for name in re.findall(r"\(NEEDED\).*\[(.*)\]", said)}:
        if _LIBRARY.match(library):
            wanted[library] = {}
    home = {version: library for said in headers for library, version in _versions(said) if library in wanted}
    for name, version in (one for path in of_torch for one in _undefined(path)):
        if version in home:
            wanted[home[version]].setdefault(version, set()).add(name)
        elif not version and _FUNCTION.match(name):
            for functions in wanted.values():  # it does not say in which library it is
                functions.setdefault("", set()).add(name)
    for library, functions in wanted.items():
        _compile(into / library, functions)


def _versions(said: str) -> Iterator[tuple[str, str]]:
    library = ""
    for what, name in re.findall(r"(File|Name): (\S+)", said):
        if what == "File":
            library = name
        else:
            yield library, name


def _undefined(path: Path) -> Iterator[tuple[str, str]]:
    """Names of functions, and the version that is asked for."""
    for line in _output("nm", "--dynamic", "--undefined-only", str(path)).splitlines():
        if line.split()[0] == "U":
            name, _, version = line.split()[1].partition("@")
            yield name, version.lstrip("@")


def _compile(library: Path, functions: dict[str, set[str]]) -> None:
    names = sorted(set().union(*functions.values()))
    labels = [f'.globl "{name}"\n.type "{name}", @function\n"{name}":' for name in names]
    code = [".text", *labels, f"movl ${_NO_DEVICE}, %eax", "ret", '.section .note.GNU-stack,"",@progbits', ""]
    source, script = library.with_suffix(".s"), library.with_suffix(".map")
    source.write_text("\n".join(code))
    versions = [(version, sorted(of)) for version, of in functions.items() if version]
    script.write_text("\n".join(f"{version} {{ global: {'; '.join(of)}; }};" for version, of in versions))
    options = [f"-Wl,--version-script={script}"] if versions else []
    command = ["cc", "-shared", "-nostdlib", f"-Wl,-soname,{library.name}", *options, "-o", str(library), str(source)]
    subprocess.run(command, check=True)


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
