"""Reports of requests: for the log, a file, answers and metrics."""
