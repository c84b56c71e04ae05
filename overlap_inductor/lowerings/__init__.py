"""lowerings of overlap_inductor (import-light: import the modules you need)."""
