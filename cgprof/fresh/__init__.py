"""What only a fresh process can tell: graphs alone, and the work of eager steps."""
