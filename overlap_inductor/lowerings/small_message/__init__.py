"""Schedule ``small_message``: a peer all-reduce of few tokens, with the norm behind it."""
