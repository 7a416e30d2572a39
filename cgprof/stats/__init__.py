"""Statistics of samples: pure functions over sequences of numbers."""
