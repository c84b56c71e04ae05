# SPDX-License-Identifier: Apache-2.0
"""What runs beside the ops of a graph: agreement of ranks, workspace, order of calls, replay of calls as CUDA graphs,
and reports of faults."""
