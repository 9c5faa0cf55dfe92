"""Matrix products of a tile, on vectors and on a matrix unit."""
