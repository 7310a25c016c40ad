"""One small file per way to save and load; :mod:`benchmarks._peer` says what is in it."""
