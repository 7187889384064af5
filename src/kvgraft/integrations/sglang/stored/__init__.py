"""Drivers of the stores of an SGLang scheduler: they write, look and read; what is stored is decided in `kvgraft.reuse`."""
