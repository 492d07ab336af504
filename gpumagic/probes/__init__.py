"""The only code that touches drivers, torch and the garbage collector. Probes return records; they never format."""
