"""Campaigns over whole trainings: a zoo of resumes that are wrong, and of others that are right.

``bugs`` has trainings that resume with a bug of a public report, each rebuilt in one marked line; ``correct`` has
trainings that resume exactly. A case is a function of a directory: it saves there, and resumes from there when it is
called again (:mod:`tests.campaigns.case`). ``python -m tests.campaigns`` has each case judged by ``verify_resume`` and
by ``dcp-plugin prove`` and prints the table; the tests run a sample, and compare each case with an uninterrupted run.
"""
