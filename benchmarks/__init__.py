"""What is measured, one file per question. ``python -m benchmarks NAME --help``; ``make bench`` runs all."""
