"""Device code in Triton, a kernel a file; :mod:`alto.kernels.triton_backend` launches it.

Shapes as in :mod:`alto.kernels.reference`, and ``W`` for the wide side of a product: ``K`` in-features or ``N``
out-features. Shrinking by ``A`` and by the transpose of ``B`` differ in strides alone, as do adding through ``B`` and
through the transpose of ``A``, and the gradients of both; so three kernels serve all products.

Token counts reach a kernel only through the grid and the tables of :mod:`alto.kernels.pass_table`: no argument changes
from step to step, and so nothing is compiled anew.
"""
