"""``python -m benchmarks NAME [options]``: run one benchmark, by name or the beginning of it; without, list them.

``--smallest`` stands for the options of a run of a second or two (``SMALLEST`` of the benchmark), which tells whether
it works. Its figures mean nothing.
"""

from __future__ import annotations

import importlib
import sys

from benchmarks import names


def main() -> None:
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    meant = [name for name in names() if wanted and name.startswith(wanted)]
    chosen = [wanted] if wanted in names() else meant
    if len(chosen) != 1:
        raise SystemExit(f"usage: python -m benchmarks NAME [options]\nbenchmarks: {', '.join(names())}")
    module = importlib.import_module(f"benchmarks.{chosen[0]}")
    options = sys.argv[2:]
    if "--smallest" in options:
        options = [*module.SMALLEST, *(option for option in options if option != "--smallest")]
    sys.argv[1:] = options
    module.main()


if __name__ == "__main__":
    main()
