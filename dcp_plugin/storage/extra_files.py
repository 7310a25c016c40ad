"""Comparisons of the extra files of a checkpoint: the files of a save besides its data files and tables of contents.

A save stores the comparison of each extra file. A verification computes it again.
"""

from __future__ import annotations

from collections.abc import Mapping

from xxhash import xxh3_128

from dcp_plugin.format import DATA_SUFFIX, Files
from dcp_plugin.media import Medium
from dcp_plugin.paths import Where

MOST_HASHED = 64 << 20
"""Largest extra file, in bytes, that a save hashes: the save waits for the hash."""
BYTES = " bytes"


def comparisons_below(medium: Medium, directory: Where, below: str = "") -> dict[str, str]:
    """Return a comparison for each extra file of a save in flight, by name. Raises OSError.

    The comparison is the file's XXH3-128, or the size of a file that would take long to hash. Links and entries that
    are no files are left out.
    """
    comparisons: dict[str, str] = {}
    for entry in medium.entries(directory):
        name = below + entry.path.name
        if entry.is_folder:
            comparisons |= comparisons_below(medium, entry.path, f"{name}/")
        elif entry.is_file and (below or not name.endswith(DATA_SUFFIX)):
            comparisons[name] = comparison_of(medium.open(directory), entry.path.name)
    return comparisons


def hash_of(data: bytes) -> str:
    return xxh3_128(data).hexdigest()


def sizes_only(comparisons: Mapping[str, str]) -> list[str]:
    """Return the files of which only the size is compared."""
    return [name for name, comparison in comparisons.items() if comparison.endswith(BYTES)]


def comparison_of(files: Files, name: str) -> str:
    """Return the comparison of one file, as in :func:`comparisons_below`."""
    with files.open(name) as file:
        size = files.size(name)
        return hash_of(file.read()) if size <= MOST_HASHED else f"{size}{BYTES}"
