"""The kernels themselves; importing one of these modules needs triton.

A program works on one chunk of one user: C rows that lie together in the packed batch, ``fill`` of them real. Names are
those of :mod:`fuxi_torchrec.ops`; ``_ptr`` marks pointers, capitals compile-time constants: K and V widths, BK and BV
their blocks (powers of two), DTYPE that of all arithmetic. No atomics: what is summed over chunks is written once per
chunk and added up in a fixed order.
"""
