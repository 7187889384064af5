"""Measurements of `kvgraft bench` and `kvgraft calibrate`; `packs`, `tokenization`, `bound` and `reuse` need numpy alone.

Public modules: `arrivals`, `calibrate`, `calibration_plot`, `chat`, `datasets`, `deadline`, `figure`, `journal`, `packs`,
`panels`, `plot`, `prompts`, `rates`, `recorded`, `reuse`, `serve`, `serve_workload`, `server_process`, `summary`,
`tokenization`, `ttft`, `workloads`.
"""
