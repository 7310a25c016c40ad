"""Makes ``benchmarks/RESULTS.md``, its chart and the table of ``README.md`` from the figures that benchmarks write."""
