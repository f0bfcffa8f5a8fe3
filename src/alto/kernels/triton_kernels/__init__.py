"""Device code in Triton; :mod:`alto.kernels.triton_backend` launches it.

Shapes as in :mod:`alto.kernels.reference`, and ``W`` for the wide side of a product, ``R`` for its narrow one: ``K``
in-features and the ``Q`` columns of the packed ``A``, or ``N`` out-features and the ranks of one member's ``B``. The
two differ only in the offset and strides of a matrix, so each file has one body and two kernels that call it: one
through the packed ``A`` of a group, one through the ``B`` of up to three of its members.

Token counts reach a kernel only through the grid and the tables of :mod:`alto.kernels.forward_table`: no argument
changes from step to step, and so nothing is compiled again.
"""
