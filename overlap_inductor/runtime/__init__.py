"""What belongs to a process group while it runs: agreement, workspace, order of calls, faults."""
