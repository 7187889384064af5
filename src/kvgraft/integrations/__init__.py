"""Adapters to real engines, one folder each; the only places that import them."""
