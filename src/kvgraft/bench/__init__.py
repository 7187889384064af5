"""Measurements behind `kvgraft bench`; `packs`, `tokenization`, `bound` and `reuse` need numpy alone."""
