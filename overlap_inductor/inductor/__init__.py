"""Where torch.compile calls this package: the pass slot, the wrapped functions of Inductor, the call of a compiled
graph."""
