"""Who leaves first: policies, and the queue that keeps candidates in their order."""
