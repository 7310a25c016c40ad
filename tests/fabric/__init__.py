"""Tests of the Fabric integration. Fabric itself is imported by the ranks only, and by their server."""
