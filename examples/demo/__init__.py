"""`make demo`: the product's point, shown on a real cluster in a few minutes.

`__main__` reads as the play, `scenes` holds its acts, `recording` the prompts that are replayed,
`report` (pure) judges what was measured; `kube`, `forward`, `traffic` and `load` touch the world.
"""
