# SPDX-License-Identifier: Apache-2.0
"""Schedule ``chunked``: vendor matmuls on chunks, inside one op.

- Ops: ``chunked_<pattern>`` and ``chunked_contracted_all_to_all_matmul`` in ``ops``, ``chunked_sum_<pattern>`` in
  ``sum_ops``, ``chunked_scaled_<pattern>`` in ``scaled_ops``.
- Launches: ``gather_launch`` and ``contracted_launch`` if rows arrive before they are multiplied, ``reduce_launch``,
  ``exchange_launch`` and ``output_launch`` if rows are multiplied before they are sent.
- Kernels: ``kernels/partial_sums.py``, and ``kernels/transfer.py`` for the schedule's transports.
- Tests: ``tests/compile/test_sums_in_chunks.py``, ``tests/compile/test_exchanges_in_chunks.py`` and
  ``tests/compile/test_outputs_in_chunks.py`` (graphs), ``tests/kernels/test_chunked.py``,
  ``tests/kernels/test_exchanges_in_chunks.py``, ``tests/kernels/test_outputs_in_chunks.py`` and
  ``tests/kernels/test_chunked_ops.py`` (numbers), ``tests/gpu/check_chunked.py``.
"""
