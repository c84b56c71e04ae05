"""Schedule ``fused``: one persistent Triton kernel a site."""
