"""How a graph is read and written: layouts, matmuls, collectives, the nodes of a site, epilogues."""
