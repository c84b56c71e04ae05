"""Schedule ``chunked``: vendor matmuls on chunks, inside one op."""
