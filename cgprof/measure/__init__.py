"""Clocks, memory readings and the loop that profiles a captured graph."""
