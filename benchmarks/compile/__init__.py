"""How long compiling a context takes, and what it costs in memory. No server and no model."""
