# SPDX-License-Identifier: Apache-2.0
"""Transports move a schedule's bytes between ranks. Importing this package imports none of its modules."""
