"""Tests of :mod:`dcp_plugin.core`, in its folders."""
