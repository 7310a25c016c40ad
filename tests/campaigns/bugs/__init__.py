"""Trainings whose resume is wrong, as in the public reports that they name. ``# the bug`` marks the line."""
