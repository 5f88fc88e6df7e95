"""One script per performance goal; `python -m benchmarks` runs them into one table."""
