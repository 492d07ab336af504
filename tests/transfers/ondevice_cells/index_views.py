# What selects views copies nothing.
y = g[0], g[:, 1], g[..., None], g[1:3, 2], g[True], x[-1], x[None, :2]
g[0, 1:] = 3.0
