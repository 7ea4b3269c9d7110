"""Benchmarks: ``pytest bench --benchmark-only`` for the small cases."""
