"""``python -m benchmarks`` measures foo_ops and the functions that a user would call instead.

Both sides run in one process, in turns, so that a busy machine slows both: the ratios count, and
absolute figures only show what they are ratios of.
"""
