"""What launching a graph costs, what is in it, and a model of the one by the other."""
