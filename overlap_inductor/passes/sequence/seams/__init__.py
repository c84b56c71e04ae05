# SPDX-License-Identifier: Apache-2.0
"""Seams: a reduce-scatter and the gather that reads its rows run band by band."""
