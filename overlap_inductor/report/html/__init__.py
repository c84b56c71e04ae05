"""Reports as HTML pages."""
