"""How a cell runs under a guard, and when its report shows."""
