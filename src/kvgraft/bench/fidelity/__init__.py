"""`kvgraft bench fidelity`: how far answers from reused K/V are from full prefill (docs/fidelity.md).

    suites -> split -> sample      which requests, and what is read before each       (no model)
    run -> measure, noise          one request after another, every setting            (journal keeps them)
    rows -> plot                   means, intervals, classes of distance

Public modules: `measure`, `meta`, `one_space`, `plot`, `rows`, `run`, `settings`, `split`, `subject`, `suites`.
"""
