"""Order of eviction: policies, and the queue that keeps candidates in their order."""
