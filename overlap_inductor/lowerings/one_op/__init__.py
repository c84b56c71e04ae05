"""What schedules whose sites are one op each have in common."""
