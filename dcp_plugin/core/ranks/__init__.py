"""The ranks of a program: their agreement before each step of a save or load, and the launch that started them.

A failure on one rank becomes a value that all ranks see in the next collective, so all ranks raise it or none does.
"""
