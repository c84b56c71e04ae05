# SPDX-License-Identifier: Apache-2.0
"""The version of the package. It is part of cache keys, reports and the plans that ranks compare."""

__version__ = "0.1.0"
