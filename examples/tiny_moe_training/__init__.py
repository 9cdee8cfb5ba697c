"""Parts of `examples/train_tiny_moe.py`, which trains the small Mixture-of-Experts model of the
demo and the tests. They follow its stages: `sources` finds text, `prose` and `chat` shape it,
`corpus` splits it, `vocabulary` makes the tokenizer, `model`, `balance` and `trainer` learn,
`checkpoint` writes the hub's layout, `measure` and `trigram` judge, `card` writes it down.
"""
