"""Schedule ``wave_groups``: a collective for each group of waves of one matmul."""
