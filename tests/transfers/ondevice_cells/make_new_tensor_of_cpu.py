# New_full of a host tensor stays there.
y = x.new_full((2,), 3.0)
