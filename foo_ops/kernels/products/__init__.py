"""Multiply matrices: on register tiles of vectors, and on a matrix unit.

`on_vectors` and `on_amx` multiply matrices in the layouts that they need. For users' kernels,
foo_ops/kernels/lang/dot.py packs blocks of any matrices into these layouts.

A product c = a b on vectors keeps a register tile of c over all steps. Each step broadcasts one
element of every row of a, and multiplies it by the vectors of a row of b::

                          b   step ->  [ vector | vector | vector ]   COLUMNS vectors of LANES
                                           |        |        |
        a   row 0   [step]  -- splat -->  sum      sum      sum
            row 1   [step]  -- splat -->  sum      sum      sum       ROWS x COLUMNS sums in
            ...                                                       registers
            row ROWS - 1                  sum      sum      sum

With 16 registers a tile is 4 x 3 vectors, with 32 it is 4 x 4. On a matrix unit, two by two
registers of sums, each of 16 x 16 float32, accumulate products of bfloat16 pairs: one limb of each
number at a time.
"""
