"""``python -m benchmarks NAME [options]``: run one benchmark; without a name, list them."""

from __future__ import annotations

import importlib
import pkgutil
import sys

import benchmarks


def main() -> None:
    names = sorted(
        module.name for module in pkgutil.iter_modules(benchmarks.__path__) if not module.name.startswith("_")
    )
    if len(sys.argv) < 2 or sys.argv[1] not in names:
        raise SystemExit(f"usage: python -m benchmarks NAME [options]\nbenchmarks: {', '.join(names)}")
    importlib.import_module(f"benchmarks.{sys.argv.pop(1)}").main()


if __name__ == "__main__":
    main()
