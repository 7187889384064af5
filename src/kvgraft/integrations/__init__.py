"""Adapters to other people's engines, one folder each; the only places that import them."""
