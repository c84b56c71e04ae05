# SPDX-License-Identifier: Apache-2.0
"""Reports of what the pass did to a graph, as data, as text and as files."""
