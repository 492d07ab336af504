# Nonzero waits and moves nothing of the user's.
where = g.nonzero()
