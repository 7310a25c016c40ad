"""What is measured, one file per question. ``python -m benchmarks NAME --help``; ``make bench`` runs all."""

import pkgutil


def names() -> list[str]:
    """Of all benchmarks: the modules of this folder that do not start with an underscore."""
    modules = pkgutil.iter_modules(__path__)
    return sorted(module.name for module in modules if not module.name.startswith("_") and not module.ispkg)
