# Operands on two devices raise, and nothing moves.
try:
    g + far
except RuntimeError:
    pass
