"""Measurements behind `kvgraft bench`; `packs`, `tokenization`, `bound` and `reuse` need numpy alone.

Public modules: `block_traces`, `packs`, `plot`, `prefix_replay`, `rates`, `reuse`, `serve`, `serve_workload`,
`server_process`, `summary`, `tokenization`, `ttft`.
"""
