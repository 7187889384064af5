"""Donors: their K/V in SGLang's pool and in host memory, copies of them, and their registration."""
