# SPDX-License-Identifier: Apache-2.0
"""How a graph is read and written: layouts, matmuls, collectives, the nodes of a site, epilogues."""
