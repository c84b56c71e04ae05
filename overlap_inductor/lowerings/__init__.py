# SPDX-License-Identifier: Apache-2.0
"""The schedules, the ops that they define, and code that several schedules share. Importing this package imports none
of its modules."""
