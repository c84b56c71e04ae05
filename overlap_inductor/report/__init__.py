"""What happened to a graph: the report, its texts and its files."""
