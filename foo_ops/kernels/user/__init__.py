"""Make kernels from a user's function: a loop over elements, or over the tiles of a range::

user's function        elementwise.py: for each element          TensorIterator's 2-d loop
of scalars         ->  output[i] = function(input[i], ...)   ->  calls it on stretches of memory

user's function        tile.py: function(*views, range(begin, end))
of views           ->  and count, check, finish              ->  threads call it on work ranges

With FOO_INTERPRET=1 kernels/interpret/ replaces both: the function runs as Python.
"""
