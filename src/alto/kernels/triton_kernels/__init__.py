"""Device code in Triton; :mod:`alto.kernels.triton_backend` launches it.

Shapes as in :mod:`alto.kernels.reference`, plus ``W`` for the wide side of a product and ``R`` for its narrow side:
``K`` in-features and the ``Q`` columns of the packed ``A``, or ``N`` out-features and the ranks of one member's ``B``.
The two cases differ only in the offset and strides of a matrix, so they share one function body: one kernel calls it
with the packed ``A`` of a group, another with the ``B`` of up to three of its members.

Token counts reach a kernel only through the grid and the tables of :mod:`alto.kernels.forward_table`. No argument
changes from step to step, so nothing is recompiled.
"""
