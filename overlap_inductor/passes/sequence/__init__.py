# SPDX-License-Identifier: Apache-2.0
"""The parts of the sequence-parallel rewrite (``passes.sequence_parallel``): find, check, estimate, write."""
