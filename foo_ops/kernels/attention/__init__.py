"""The kernels of attention: forward, decode and merge, backward, and the mask of dropout.

All of them work on tiles that lie *transposed* in scratch memory: a row for each key (or each
column of the value), with the queries of a block side by side in it. A vector then holds the scores
of several queries for one key, so that the softmax needs no operation across lanes, and on vectors
keys and values enter the products one broadcast element at a time, most often from where they are.

They go over a block's queries panel by panel: as many as a register tile takes (or as are quickest
for a matrix unit), or all where the scores are modified. What is kept of the queries between tiles
(themselves, the sums of the output) lies panel after panel, so that a product reads neighbouring
lines of few pages.

A block has up to QUERY_BLOCK queries, and up to TILE_STRIDE where a tile holds all of them: of one
head, or all the queries of several heads that share a key head. A tile has up to KEY_BLOCK keys.
"""
