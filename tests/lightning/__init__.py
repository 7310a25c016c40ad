"""Tests of the Lightning integration. Lightning itself is imported by the ranks only, and by their server."""
