"""``python -m benchmarks NAME [options]``: run one benchmark, by name or the beginning of it; without, list them."""

from __future__ import annotations

import importlib
import pkgutil
import sys

import benchmarks


def main() -> None:
    names = sorted(
        module.name for module in pkgutil.iter_modules(benchmarks.__path__) if not module.name.startswith("_")
    )
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    meant = [name for name in names if wanted and name.startswith(wanted)]
    chosen = [wanted] if wanted in names else meant
    if len(chosen) != 1:
        raise SystemExit(f"usage: python -m benchmarks NAME [options]\nbenchmarks: {', '.join(names)}")
    del sys.argv[1]
    importlib.import_module(f"benchmarks.{chosen[0]}").main()


if __name__ == "__main__":
    main()
