"""How fast attention over shared segments is on one card, beside kernels of others. No server and no model."""
