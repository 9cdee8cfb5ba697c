"""`moe-plan`: the placement algorithms from a terminal, on files.

`main` is the door; each sub-command has a module of its own name. `load_files`, `trace_files` and
`plan_files` are the only readers and writers, `tables`, `bars`, `plot` and `progress` the only ones
that know a screen. rich and matplotlib are imported when something is drawn, so the algorithms
never need them.
"""
