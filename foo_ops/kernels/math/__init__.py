"""Mathematical functions of vectors and scalars, written once, as formulas."""
