"""Continuous batching: the scheduler, active requests, drafts, and the budget of prefill."""
