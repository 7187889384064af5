"""Donors in stores behind this process: kept for the next one, shared with others. Nothing here is ever waited for long."""
