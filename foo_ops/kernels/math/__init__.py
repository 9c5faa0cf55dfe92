"""Functions of numbers, for vectors and scalars alike: written once, as formulas."""
