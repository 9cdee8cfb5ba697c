"""One generation engine per rank.

Without torch: sequence, blocks, scheduler. With it: kv, batch, runner, sampler.
"""
