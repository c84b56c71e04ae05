# SPDX-License-Identifier: Apache-2.0
"""Seams: a reduce-scatter and the all-gather after it run band by band."""
