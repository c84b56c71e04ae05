"""Schedule ``ring``: steps over send and receive, unrolled in the graph or looped in one op."""
