"""Dual batch overlap: when to split a step, where to cut it, and how the parts take turns."""
