# SPDX-License-Identifier: Apache-2.0
"""What runs beside the ops of a graph: agreement of ranks, workspace, order and replay of calls, and reports of
faults."""
