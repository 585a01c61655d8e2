"""What the heads, the exact inference and training cost: ``python -m benchmarks``, see docs/benchmarks.md."""
