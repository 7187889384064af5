"""Tables of docs/results.md, measured by `python -m benchmarks.suite` and written from committed records."""
