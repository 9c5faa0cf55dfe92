"""The kernels of attention: forward, decode and merge, backward, and the dropout mask.

A block is some queries of one head, or all queries of several heads that share a key head. A kernel
goes over the block's keys tile by tile. A score tile lies *transposed* in scratch memory, with a
row for each key, so that a vector holds the scores of several queries for one key and the softmax
needs no operation across lanes::

                    the block's queries: up to QUERY_BLOCK, or TILE_STRIDE if heads share a tile
                   +-----------+-----------+-----+
        the tile's |           |           |     |   scores[key * TILE_STRIDE + query]
        keys, up   |  panel    |  panel    |     |
        to         |           |           |     |   largest, total: one number for each query
        KEY_BLOCK  +-----------+-----------+-----+
                    next_panel   next_panel         queries:     one panel after the other
                    columns      columns            accumulator: one panel after the other

A panel is the queries of one register tile's columns, or the number that is fastest on a matrix
unit, or the whole block where a score_mod loads a bias for it. For each panel the forward kernel

    1. multiplies the keys by the panel's queries:              scores = K Q^T
    2. scales, modifies and masks the scores;
    3. turns them into weights, with the running maximum and sum of each query (online softmax);
    4. adds the product of the values and the weights:          accumulator += V^T P

before the next one, while the scores are in L1. A panel's data that outlives a tile (its queries,
its rows of the output) is contiguous, so that a product reads neighbouring lines of few pages. The
backward kernel goes over the same tiles and panels; from the weights and the gradients of the
scores it adds to grad_query panel by panel, and to grad_key and grad_value once for all panels of a
tile. A matrix unit multiplies beside the vector units, so there the backward kernel computes the
products of one panel during the vector work of its neighbour: see
foo_ops/kernels/attention/pipeline.py.
"""

# Defines integer division for all kernels.
from foo_ops.kernels import lang  # noqa: F401
