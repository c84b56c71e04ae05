"""Reports: what happened to a graph, as data, as text and as files."""
