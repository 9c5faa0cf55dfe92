"""Compile a Python function, and find the address of its machine code.

A launcher gets a kernel from `resolve` by its name. `kernel` has the table of kernels, `cache`
takes the object code from disk or else from `emit`, and with `numba_target` Numba emits LLVM IR.
No module here depends on a particular kernel::

    resolve(name, signature) -> KERNELS[name] -> cache.load -> read
                                                            -> emit.compile_kernel -> write
                                                            -> link -> address
"""
