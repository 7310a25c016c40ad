"""Tests of what every integration does alike."""
