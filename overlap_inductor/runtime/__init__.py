# SPDX-License-Identifier: Apache-2.0
"""What runs beside the ops of a graph: the agreement of a group's ranks, their workspace, the order of calls, the
replay of calls as CUDA graphs, and the report of faults."""
