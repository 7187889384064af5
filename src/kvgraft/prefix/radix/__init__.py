"""The radix tree: nodes, structure, and the cache of one pool on it."""
