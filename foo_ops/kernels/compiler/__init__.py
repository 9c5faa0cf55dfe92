"""Compile a Python function, and find the address of its machine code. It knows no kernel.

A launcher asks `resolve` for a kernel by its name. `kernel` has the table in which it is found,
`load` takes its object code from the `cache` on disk or else from `emit`, and `numba_target` is
what Numba makes LLVM's language with::

    resolve(name, signature) -> KERNELS[name] -> load -> cache.read
                                                      -> emit.compile_kernel -> cache.write
                                                      -> link -> address
"""
