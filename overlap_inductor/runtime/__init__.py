# SPDX-License-Identifier: Apache-2.0
"""The parts that run with a process group: the agreement of its ranks, their workspace, the order of calls, and
faults."""
