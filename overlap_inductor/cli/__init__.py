"""The command ``overlap-inductor``."""
