# Iteration makes views.
rows = [row for row in g]
