# A deep copy stays where it is.
import copy
y = copy.deepcopy(g)
other = copy.deepcopy(model)
