"""Measurements behind `kvgraft bench`; `packs`, `tokenization`, `bound` and `reuse` need numpy alone.

Public modules: `block_traces`, `calibrate`, `calibration_plot`, `chat`, `figure`, `journal`, `packs`, `panels`, `plot`,
`prefix_replay`, `prompts`, `rates`, `reuse`, `serve`, `serve_workload`, `server_process`, `summary`, `tokenization`, `ttft`,
`workloads`.
"""
