"""Who computes what: ranks and their groups."""
