"""``python -m benchmarks`` measures foo_ops beside what a user would call instead.

Both sides run in one process, in turns, so that a busy machine slows both: the ratios count, the
absolute figures only say what they are ratios of.
"""
