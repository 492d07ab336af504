# Elements picked by a mask.
y = g[g > 0]
