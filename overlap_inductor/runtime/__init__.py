# SPDX-License-Identifier: Apache-2.0
"""What belongs to a process group while it runs: agreement, workspace, order of calls, faults."""
