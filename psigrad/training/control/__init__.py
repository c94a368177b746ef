"""Control: the loops that train small policies on Gymnasium environments."""
