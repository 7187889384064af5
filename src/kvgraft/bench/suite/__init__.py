"""`kvgraft bench suite`: the tables that people choose by, a module per table.

Public modules: `cost`, `datasets`, `length`, `length_page`, `page`, `plot`, `quality`, `random_weights`, `similarity`,
`turns`.
"""
