"""Trainings that resume exactly, and do on the way what could be taken for a bug."""
