# SPDX-License-Identifier: Apache-2.0
"""Thin wrappers of private torch APIs, and the differences between torch 2.11 and 2.15. Only this package and
``inductor/`` import private torch APIs."""
