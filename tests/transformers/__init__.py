"""Tests of :mod:`dcp_plugin.transformers`."""
