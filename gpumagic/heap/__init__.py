"""Python's heap as a tensor sees it: names, holders, storages, gradients, graphs and reference cycles."""
