# Unique values.
values = g.unique()
