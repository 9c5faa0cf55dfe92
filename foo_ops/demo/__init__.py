"""``python -m foo_ops.demo``: a GPT learns the Python documentation on device foo."""
