"""The campaign of faults: what a save, a load or a clean-up does when the machine, the disk or a person fails it.

``layer.c`` counts, records, fails or ends at the file-system calls of a process (loaded with LD_PRELOAD);
:mod:`tests.faults.victims` runs functions in forked processes that have it; :mod:`tests.faults.scenes` has them;
:mod:`tests.faults.oracle` says what has to hold afterwards; :mod:`tests.faults.power` builds the states that a loss of
power may leave; :mod:`tests.faults.flips` damages files; :mod:`tests.faults.campaign` counts. ``python -m
tests.faults`` and, for damage to files, ``python -m tests.faults flips`` run all of it and print the counts; the tests
run a sample.
"""
