"""`kvgraft bench suite`: the tables that people choose by, a module per table.

Public modules: `cost`, `datasets`, `length`, `page`, `quality`, `random_weights`, `similarity`, `turns`.
"""
