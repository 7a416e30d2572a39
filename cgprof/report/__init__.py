"""Tables, figures and comparisons made from run folders."""
