"""What the user asks for: run configs, model cards, and which combinations are refused."""
