# SPDX-License-Identifier: Apache-2.0
"""Reports: what happened to a graph, as data, as text and as files."""
